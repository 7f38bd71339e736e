"""A node without a GPU and without weights that plans cold calls as production does, by ColdStarts.

The base is the 7B shape; adapters are on q, k, v, in bf16, and lie in host memory. A call is described by its rank, its
tokens and how many calls come at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch

from adapters.base_model import BaseModel, projection_widths
from node_agent.adapter_memory.layout import ROW_ALIGN, AdapterLayout, lay_out_uniform
from node_agent.adapter_memory.pages import LARGEST_PAGE
from node_agent.coldstart.cold_starts import MODES, ColdStartMode, ColdStarts
from node_agent.coldstart.pass_times import CallKind, PassSample, PassTimes, kind_of
from node_agent.coldstart.planner import Contention
from node_agent.coldstart.profile import LinkCost, Profile
from node_agent.leases import LayerState, Lease
from node_agent.types import GROUPS, Plan
from tests.support.random_model import SHAPES

SHAPE = SHAPES["7b"]
BASE = BaseModel(
    "7b", "", "llama", SHAPE["num_hidden_layers"], SHAPE["hidden_size"], SHAPE["vocab_size"],
    SHAPE["max_position_embeddings"], projection_widths(SHAPE),
)  # fmt: skip
MAX_AT_ONCE = 8
"""Loads that the engine of the reports lets begin together: a quarter of its 32 rows. Other calls wait in its queue."""
PLANS = ("wait", "pipeline", "assist")


class HostMemory:
    """Stands in for the AdapterStore: each adapter is in host memory, and none of its layers on the device. A lease's
    digest is its rank."""

    def __init__(self) -> None:
        self.pool = SimpleNamespace(data=torch.empty(0, dtype=torch.bfloat16, device="meta"))
        self.loads_in_flight = 1
        self._layouts: dict[str, AdapterLayout] = {}

    def layout(self, lease: Lease) -> AdapterLayout:
        if lease.digest not in self._layouts:
            units = LARGEST_PAGE // ROW_ALIGN
            layout = lay_out_uniform(BASE, int(lease.digest), GROUPS["qkv"], self.pool.data.element_size(), units)
            self._layouts[lease.digest] = layout
        return self._layouts[lease.digest]

    def state(self, *_: object) -> int:
        """Returns the state of every adapter's every layer."""
        return LayerState.HOST

    def set_order(self, *_: object) -> None:
        """Does nothing: nothing is loaded."""


@dataclass(frozen=True)
class Call:
    """A kind of call, of which several may come at once, each with its own adapter."""

    rank: int
    tokens: int
    loads: int = 1

    @property
    def lease(self) -> Lease:
        return Lease(str(self.rank), 0, (self.rank,))


class ReplayedNode:
    """Plans calls, each or the first of several that come at once, and keeps what it learns of passes."""

    def __init__(self, profile: Profile, workers: int) -> None:
        """`workers`: how many CPU workers can take work; 0: the node has none."""
        self.store = HostMemory()
        self.starts = ColdStarts(cast(Any, self.store), BASE, MODES["auto"], profile)
        self.starts.workers = cast(Any, SimpleNamespace(usable=workers, engine_cores=None))

    def kind(self, call: Call) -> CallKind:
        return kind_of(self.store.layout(call.lease), call.tokens)

    def plan(self, call: Call, mode: ColdStartMode = MODES["auto"]) -> Plan:
        """Returns the plan of the call, or of the first one of several that come at once. They ask for one token, as
        the reports' calls do."""
        at_once = min(call.loads, MAX_AT_ONCE)
        self.store.loads_in_flight, self.starts.mode = at_once, mode
        return self.starts.plan(call.lease, call.tokens, Contention(other_requests=at_once - 1))

    def forecast(self, call: Call, plan: str) -> float:
        """Returns the seconds of a lone call under this plan by the profile alone, as calibration gets them; 0 where
        the plan is not possible."""
        chosen = self.plan(call, ColdStartMode((plan,)))
        return chosen.by_profile if chosen.name == plan else 0.0

    def learn(self, samples: Sequence[PassSample]) -> None:
        """Replaces what the node knows of passes."""
        self.starts.times = PassTimes(samples)


def profile_at(encoded: dict[str, Any], rate: float | None) -> Profile:
    """Returns the profile of a GPU report at a link rate in GB/s; None: at the link's own.

    Below the link's own rate the report's loads were delayed, and what workers are handed and give back was not: there
    the node's workers share the device's memory, and a handoff's latency is part of their fixed cost.
    """
    profile = msgspec.convert(encoded, Profile)
    if rate is None:
        return profile
    assert profile.cpu is not None and profile.handoff is not None  # the reports have CPU workers on a GPU
    cpu = msgspec.structs.replace(profile.cpu, fixed=profile.cpu.fixed + profile.handoff.latency)
    link = LinkCost(profile.link.latency, min(rate * 1e9, profile.link.bandwidth))
    return msgspec.structs.replace(profile, link=link, cpu=cpu, handoff=None)
