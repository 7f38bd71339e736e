"""A request: as a trace states it, and on its way through the simulated nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from garnish.simulation.memory import Entry

USUAL_TTFT = 10.0
"""Seconds, without a TTFT SLO; equal to that of `node_agent/engine/request.py`."""
Outcome = Literal["", "done", "rejected"]


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    at: float
    """seconds since the start of the trace"""
    function: str
    """opaque name; empty for the base alone"""
    rank: int
    prompt_tokens: int
    output_tokens: int
    """true number of generated tokens, known to the oracle policy alone"""
    tenant: str = ""
    bytes: int = 0
    """size of the adapter; 0 derives it from the rank"""


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
    tenant: str = ""
    function: str = ""
    weight: float = 1.0
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    node: int = -1
    arrival_tier: int = 0
    """tier of its adapter when it reached the node"""
    admitted: float = 0.0
    first_token: float = 0.0
    end: float = 0.0
    outcome: Outcome = ""
    moves: int = 0
    generated: int = 0
    remaining: int = 0
    """prompt tokens that are not computed yet; after a move also tokens generated elsewhere"""
    kv: int = 0
    """tokens of KV memory"""
    finish_step: int = 0
    charged: int = 0
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
