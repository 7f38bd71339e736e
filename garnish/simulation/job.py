"""A request: as a trace tells it, and on its way through the simulated nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from garnish.simulation.memory import Entry

USUAL_TTFT = 10.0
"""Seconds, where nothing was promised; as `node_agent/engine/request.py` has it."""
Outcome = Literal["", "done", "rejected"]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    at: float
    """seconds since the trace's beginning"""
    function: str
    """opaque; an empty one is the base alone"""
    rank: int
    prompt_tokens: int
    output_tokens: int
    """that were really generated; no policy but the oracle is told"""
    tenant: str = ""
    bytes: int = 0
    """of the adapter; 0: by its rank"""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the simulated nodes. Times are simulated seconds; 0 until known."""

    number: int
    at: float
    digest: str | None
    rank: int
    bytes: int
    prompt: int
    output: int
    max_tokens: int
    """that its caller states"""
    tenant: str = ""
    function: str = ""
    weight: float = 1.0
    """the tenant's"""
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    node: int = -1
    found: int = 0
    """tier of its adapter when it reached the node"""
    admitted: float = 0.0
    first_token: float = 0.0
    end: float = 0.0
    outcome: Outcome = ""
    moves: int = 0
    """to another node, by a policy that migrates"""
    generated: int = 0
    left: int = 0
    """prompt tokens (and, after a move, tokens generated elsewhere) that are not computed yet"""
    kv: int = 0
    """tokens of KV memory that it holds"""
    finish_step: int = 0
    charged: int = 0
    """tokens that its tenant and function have been charged for"""
    entry: Entry | None = field(default=None, repr=False)

    @property
    def first_token_deadline(self) -> float:
        """Returns when the first token is due: the promised TTFT, or USUAL_TTFT, after the arrival; simulated
        seconds."""
        return self.at + (USUAL_TTFT if self.ttft_slo is None else self.ttft_slo)

    @property
    def ttft(self) -> float:
        return self.first_token - self.at

    @property
    def tpt(self) -> float:
        """The time per token: E2E / output tokens."""
        return (self.end - self.at) / self.output

    @property
    def tpot(self) -> float:
        """The time per output token after the first: (E2E - TTFT) / (n - 1); 0 of a single token."""
        return (self.end - self.first_token) / (self.output - 1) if self.output > 1 else 0.0
