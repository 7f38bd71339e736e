"""Request inside the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cluster.messages import Adapter, Sampling, SloClass
from node_agent.runner.score_rules import ScoreRules
from node_agent.states import REQUEST_TRANSITIONS, RequestState, check_transition
from node_agent.types import Lease


@dataclass
class ColdPhases:
    """Delays that a request had because its adapter was not on the device."""

    started_at: float
    """admission; monotonic seconds"""
    plan: str = "wait"
    """plan of its first chunk that was computed before the whole adapter was there"""
    forecast: float = 0.0
    """seconds of exposed load, as planned"""
    exposed: float = 0.0
    """seconds in which its computation waited for adapter bytes, before its admission too"""
    load: float = 0.0
    """seconds that the adapter's load took; 0 while it runs"""
    fetch: float = 0.0
    """seconds of `load` until the adapter was in host memory"""
    layers_cpu: int = 0
    layers_device: int = 0
    """layers of cold chunks, by where the adapter's part was computed"""
    waits_since: float = 0.0
    """start of a wait of its next step for adapter bytes that no cold pass can do without; monotonic"""
    opened: bool = False
    """a chunk began before the whole adapter was there"""
    replays: int = 0
    """chunks that were computed again because a worker failed"""

    def end_wait(self, now: float) -> None:
        """Books what it has waited for the load, which has ended or is waited for no more."""
        if not self.opened:
            self.exposed += now - self.started_at
        elif self.waits_since:
            self.exposed += now - self.waits_since


USUAL_TTFT = 10.0
"""Seconds in which a request without a promise is due: finite, so that those with one can't pass it for ever."""


@dataclass(eq=False)
class Request:
    """`tokens` is the prompt and what was generated, here or on a node before; the KV cache holds the first `computed`
    of them."""

    id: str
    tenant: str
    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    deadline: float
    adapter: Adapter | None
    ignore_eos: bool
    function: str = ""
    weight: float = 1.0
    slo_class: SloClass = "standard"
    reserved: int = 0
    ttft: float | None = None
    tpot: float | None = None
    arrival_tier: str = "none"
    """tier of the adapter when the request arrived"""
    arrived: float = field(default_factory=time.monotonic)
    prompt_len: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """keys of its first whole blocks, as far as they were asked for"""
    known_blocks: int = 0
    """number of its first `blocks` that others may use, too"""
    lease: Lease | None = None
    short_since: float = 0.0
    """first time that it found too little adapter memory"""
    held_at: float = 0.0
    """last time that its adapter's bytes alone kept it out of the batch; monotonic, 0: something else did"""
    held_s: float = 0.0
    device_seconds: float = 0.0
    """seconds of the passes that computed it, its part"""
    admitted: float = 0.0
    first_token: float = 0.0
    cold: ColdPhases | None = None
    """set if its adapter was not on the device when it was admitted"""
    state: RequestState = RequestState.WAITING
    rules: ScoreRules | None = None
    """changes that its parameters make of its scores; made at its admission where they make any"""
    scored: int = 0
    """prompt tokens whose log probabilities were sent, where these are asked for; the first has none"""
    pauses: int = 0
    """passes in succession that it has sat out for strict requests"""
    pauses_in_all: int = 0
    after_idle: bool = False
    """first request of its tenant for a while: it may take a place of those that have more than their share"""
    preemptions: int = 0
    """number of times that it gave its place to another request; `computed` counts from the last one on"""

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    def change_state(self, state: RequestState) -> None:
        """Sets the state. Raises IllegalTransition unless REQUEST_TRANSITIONS has the change."""
        check_transition(self.state, state, REQUEST_TRANSITIONS)
        self.state = state

    @property
    def in_cold_pass(self) -> bool:
        return self.state is RequestState.COLD_PREFILLING

    @property
    def awaits_adapter(self) -> bool:
        """Returns whether its next step waits for the whole adapter: it was planned so, a worker failed it, or memory
        was short."""
        return self.state is RequestState.AWAITING_ADAPTER

    @property
    def first_token_deadline(self) -> float:
        """Returns when the first token is due: the promised TTFT, or USUAL_TTFT, after the arrival; monotonic
        seconds."""
        return self.arrived + (USUAL_TTFT if self.ttft is None else self.ttft)

    @property
    def rank(self) -> int:
        return max(self.adapter.ranks, default=0) if self.adapter else 0

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def uncomputed(self) -> int:
        """Tokens that the cache does not have yet."""
        return len(self.tokens) - self.computed

    @property
    def found_tokens(self) -> int:
        """Returns the prompt tokens whose keys and values were cached, before it computes anything. Returns 0 for one
        that continues: its prompt was computed on a node before."""
        return 0 if self.generated else self.computed

    def begin_again(self) -> None:
        """Resets it: it has given its place away, and all that it computed."""
        self.change_state(RequestState.PREEMPTED)
        self.computed, self.known_blocks, self.pauses = 0, 0, 0
        self.preemptions += 1

    @property
    def decoding(self) -> bool:
        """The prompt and all but the last token are in the cache."""
        return self.generated > 0 and self.computed == len(self.tokens) - 1
