"""Prompts that are computed before the batch goes on: those of tenants that ask for little, while another asks for more
than the node has.

In the batch's pass they would wait for the one under way, and be computed beside all that a flood has there: the first
token would come later than without the flood, in whatever order requests are admitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from node_agent.engine.batch import Row
from node_agent.engine.request import Request
from node_agent.engine.reserves import Reserves
from node_agent.engine.rows import Loaded, Turn, choose_prompts

MOST_PASSES = 4
"""Of newcomers in an iteration. Their prompts have no more tokens together than one chunk, so that the batch stands
still for a bounded time, and then goes on by a step, whatever comes."""


class Newcomers:
    """Counts what they have had."""

    def __init__(self) -> None:
        self._left = self._least = 0
        """tokens that they may have in the iteration yet, and what a pass of theirs counts at least"""
        self._overtook = 0

    def begin_iteration(self, chunk_tokens: int) -> None:
        self._left, self._least = chunk_tokens, chunk_tokens // MOST_PASSES

    def limit(self, tokens: float) -> None:
        """They may have no more in what is left of the iteration."""
        self._left = int(max(0, min(self._left, tokens)))

    def choose(self, running: Iterable[Request], reserves: Reserves, loaded: Loaded, turn: Turn) -> list[Row]:
        """The rows of a pass of their own; mostly none."""
        if not self._left or self._left < self._least:
            return []
        found = [r for r in running if not r.first_token and reserves.modest(r.tenant)]
        if not found or not reserves.crowded:
            return []
        rows = choose_prompts(found, loaded, self._left, turn)
        if rows:
            tokens = sum(row.length for row in rows)
            self._overtook += tokens
            self.limit(self._left - max(tokens, self._least))
        return rows

    def take_overtaken(self) -> int:
        """Tokens that have overtaken the batch since the last call: its own prompts get so many fewer."""
        overtook, self._overtook = self._overtook, 0
        return overtook
