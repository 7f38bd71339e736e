"""First-fit allocator of contiguous index ranges; freed ranges are merged."""

from __future__ import annotations

import bisect


class FreeRuns:
    """Free index ranges within 0..size-1."""

    def __init__(self, size: int) -> None:
        self._runs: list[tuple[int, int]] = [(0, size)] if size else []

    def take(self, length: int) -> int | None:
        """Allocates `length` >= 1 consecutive indices. Returns the first, or None when no free range is long enough."""
        for i, (start, run) in enumerate(self._runs):
            if run >= length:
                self._runs[i : i + 1] = [(start + length, run - length)] if run > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Frees `length` indices from `start` on. Raises RuntimeError when any of them is already free."""
        i = bisect.bisect(self._runs, (start, length))
        before = self._runs[i - 1] if i else None
        after = self._runs[i] if i < len(self._runs) else None
        if (before and sum(before) > start) or (after and start + length > after[0]):
            raise RuntimeError(f"run {start}+{length} was freed twice")
        begin, end = start, start + length
        low = high = i
        if before and sum(before) == start:
            begin, low = before[0], i - 1
        if after and after[0] == end:
            end, high = sum(after), i + 1
        self._runs[low:high] = [(begin, end - begin)]
