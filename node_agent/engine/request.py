"""Request inside the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.messages import Adapter, Sampling, SloClass
from node_agent.leases import Lease
from node_agent.states import REQUEST_TRANSITIONS, RequestState, check_transition

if TYPE_CHECKING:
    import numpy as np

    from node_agent.engine.grammars import RequestGrammar
    from node_agent.runner.score_rules import ScoreRules


@dataclass
class ColdPhases:
    """Delays of a request whose adapter was not on the device."""

    started_at: float
    """time of admission, in monotonic seconds"""
    plan: str = "wait"
    """plan of its first chunk that was computed while the adapter was loading"""
    forecast: float = 0.0
    """planned seconds of waiting for adapter bytes"""
    exposed: float = 0.0
    """seconds of waiting for adapter bytes, including before admission"""
    load: float = 0.0
    """seconds that the adapter's load took; 0 while it runs"""
    fetch: float = 0.0
    """seconds of `load` until the adapter was in host memory"""
    layers_cpu: int = 0
    layers_device: int = 0
    """number of layers of cold chunks whose LoRA terms CPU workers or the device computed: the previous field and this
    one"""
    waits_since: float = 0.0
    """time since which its next step waits for the whole adapter, in monotonic seconds; 0 if it is not waiting"""
    opened: bool = False
    """whether a chunk was started while the adapter was loading"""
    replays: int = 0
    """number of chunks computed again because a worker failed"""

    def end_wait(self, now: float) -> None:
        """Adds the time waited for the load, which has ended or is no longer waited for."""
        if not self.opened:
            self.exposed += now - self.started_at
        elif self.waits_since:
            self.exposed += now - self.waits_since


USUAL_TTFT = 10.0
"""Assumed limit for the time to first token, in seconds, for requests without a promise. It is finite, so that requests
with a promise can't pass them forever."""


@dataclass(eq=False)
class Request:
    """Request in the engine. `tokens` are the prompt, and the tokens generated here or on an earlier node. The KV cache
    holds the first `computed` of them."""

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
    """tier of the adapter when the request arrived; "none": on the device, or no adapter"""
    arrived: float = field(default_factory=time.monotonic)
    prompt_len: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """keys of its first full blocks, as far as they were computed"""
    known_blocks: int = 0
    """number of its first blocks that are in the prefix cache, so that other requests may share them"""
    lease: Lease | None = None
    short_since: float = 0.0
    """time at which it first found too little adapter memory, in monotonic seconds; 0: never"""
    held_at: float = 0.0
    """time since which it waits in the queue only for its adapter's bytes, in monotonic seconds; 0 if it does not"""
    held_s: float = 0.0
    device_seconds: float = 0.0
    """its share of the seconds of the passes that computed it"""
    admitted: float = 0.0
    first_token: float = 0.0
    cold: ColdPhases | None = None
    """set if its adapter was not on the device at admission"""
    state: RequestState = RequestState.WAITING
    rules: ScoreRules | None = None
    """changes that its parameters make to its logits; None if they make none; created at admission"""
    allowed: np.ndarray | None = None
    """tokens that its output may have, as bits i32[ceil(V / 32)]; None: all; created at admission"""
    grammar: RequestGrammar | None = None
    """form that its output must have; None: any text"""
    scored: int = 0
    """position up to which log probabilities of prompt tokens were sent, if requested; the first token has none"""
    pauses: int = 0
    """consecutive passes that it has sat out for strict requests"""
    pauses_in_all: int = 0
    after_idle: bool = False
    """True if it is its tenant's first request after a pause. It may then take the row and blocks of a tenant over its
    share."""
    can_restart: bool = True
    """False: its computation can't begin again, so that it is never preempted"""
    preemptions: int = 0
    """number of preemptions; each resets `computed`"""
    cached_tokens: int = 0
    """number of prompt tokens found in the prefix cache when it was first computed"""

    @property
    def cache_owner(self) -> str:
        """Returns the owner of the request's cached prefixes: its tenant, or a part of it (`cache_salt`)."""
        salt = self.sampling.cache_salt
        return f"{self.tenant}\n{salt}" if salt else self.tenant

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.tokens)

    def change_state(self, state: RequestState) -> None:
        """Sets the state. Raises IllegalTransition unless REQUEST_TRANSITIONS has the transition."""
        check_transition(self.state, state, REQUEST_TRANSITIONS)
        self.state = state

    @property
    def in_cold_pass(self) -> bool:
        return self.state is RequestState.COLD_PREFILLING

    @property
    def awaits_adapter(self) -> bool:
        """Returns whether its next step waits for the whole adapter. This is so by plan, after a worker has failed, or
        after memory was short."""
        return self.state is RequestState.AWAITING_ADAPTER

    @property
    def first_token_deadline(self) -> float:
        """Returns the deadline of the first token in monotonic seconds: arrival plus promised TTFT, or USUAL_TTFT
        without a promise."""
        return self.arrived + (USUAL_TTFT if self.ttft is None else self.ttft)

    @property
    def rank(self) -> int:
        """Largest rank of the request's adapter; 0 without one."""
        return self.adapter.max_rank if self.adapter else 0

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def uncomputed(self) -> int:
        """Returns the number of tokens that are not in the KV cache yet."""
        return len(self.tokens) - self.computed

    @property
    def found_tokens(self) -> int:
        """Returns the number of prompt tokens found in the prefix cache; valid before anything is computed. Returns 0
        for a request continued from another node."""
        return 0 if self.generated else self.computed

    def begin_again(self) -> None:
        """Resets the request after a preemption: nothing is computed any more."""
        self.change_state(RequestState.PREEMPTED)
        self.computed, self.known_blocks, self.pauses = 0, 0, 0
        self.preemptions += 1

    @property
    def decoding(self) -> bool:
        """Returns whether the prompt and all generated tokens but the last are in the KV cache."""
        return self.generated > 0 and self.computed == len(self.tokens) - 1
