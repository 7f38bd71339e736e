"""Rows of a pass: which tokens of which request it computes."""

from __future__ import annotations

from dataclasses import dataclass

from node_agent.engine.request import Request


@dataclass(frozen=True)
class Row:
    """Tokens of one request in a pass: `length` tokens from position `request.computed` + `ahead`."""

    request: Request
    length: int
    ahead: int = 0
    """1 if the row starts one position later, at a token that a running step is still choosing; else 0"""

    @property
    def begin(self) -> int:
        """Position in the request of the row's first token."""
        return self.request.computed + self.ahead

    @property
    def wants_logits(self) -> bool:
        """Returns whether the row ends with the request's last known token, so that the next token is sampled."""
        return self.request.computed + self.length == len(self.request.tokens)

    @property
    def scored(self) -> range:
        """Positions in the request of the prompt tokens that this row scores. Empty if no log probabilities of the
        prompt are requested."""
        request = self.request
        if request.sampling.prompt_logprobs is None:
            return range(0)
        return range(
            max(request.computed + 1, request.scored), min(request.computed + self.length + 1, request.prompt_len)
        )


def share_out(seconds: float, rows: list[Row]) -> None:
    """Adds the seconds of a pass to its requests' device time, in proportion to their tokens."""
    tokens = sum(row.length for row in rows)
    for row in rows:
        row.request.device_seconds += seconds * row.length / tokens
