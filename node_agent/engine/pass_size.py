"""How large a hot pass may be: smaller than what it could have when there was too little memory for one."""

from __future__ import annotations

from node_agent.engine.batch import Row

GROWS_AFTER = 16
"""Passes that succeeded, before the next ones may have twice as many tokens."""
LARGEST = 1 << 20
"""Tokens; no pass has more, so that the bound is lifted there."""


class PassSize:
    def __init__(self) -> None:
        self._most = LARGEST
        self._succeeded = 0
        self._turn = 0
        """rows take turns where not all fit"""

    def cut(self, rows: list[Row], n_decode: int) -> tuple[list[Row], int]:
        """Returns the rows that fit, in their order, and how many of them decode (the first `n_decode` of `rows` do);
        the last one may be a shorter chunk."""
        if sum(row.length for row in rows) <= self._most:
            return rows, n_decode
        begin, left = self._turn % len(rows), self._most
        lengths = [0] * len(rows)
        for index in [*range(begin, len(rows)), *range(begin)]:
            lengths[index] = min(rows[index].length, left)
            left -= lengths[index]
        self._turn += sum(map(bool, lengths))
        fit = [Row(row.request, length) for row, length in zip(rows, lengths, strict=True) if length]
        return fit, sum(map(bool, lengths[:n_decode]))

    def shrink(self, tokens: int) -> None:
        """There was no memory for a pass of so many tokens."""
        self._most, self._succeeded = max(1, min(tokens, self._most) // 2), 0

    def grow(self) -> None:
        """A pass succeeded."""
        self._succeeded += 1
        if self._succeeded >= GROWS_AFTER and self._most < LARGEST:
            self._most, self._succeeded = 2 * self._most, 0
