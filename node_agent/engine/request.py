"""One request inside the engine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from cluster.messages import Adapter, Sampling
from node_agent.types import Lease, Plan


@dataclass(eq=False)
class Request:
    """`tokens` is the prompt and what was generated; the KV cache holds the first `computed` of them."""

    id: str
    tenant: str
    tokens: list[int]
    max_tokens: int
    sampling: Sampling
    deadline: float
    adapter: Adapter | None
    ignore_eos: bool
    found: str = "none"
    """where the adapter was when the request arrived"""
    arrived: float = field(default_factory=time.monotonic)
    prompt_len: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    lease: Lease | None = None
    short_since: float = 0.0
    """when it first found too little adapter memory"""
    admitted: float = 0.0
    first_token: float = 0.0
    plan: Plan | None = None
    """how it gets its adapter, if that was not on the device when it was admitted"""
    load: float = 0.0
    """seconds that the adapter's load took, if it waited for one"""
    in_cold_pass: bool = False
    counts: Counter[int] = field(default_factory=Counter)
    """generated tokens, kept only where a penalty needs them"""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """The prompt and all but the last token are in the cache."""
        return self.generated > 0 and self.computed == len(self.tokens) - 1

    @property
    def penalised(self) -> bool:
        return bool(self.sampling.presence_penalty or self.sampling.frequency_penalty)
