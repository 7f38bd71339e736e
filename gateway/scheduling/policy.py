"""The interface between routing and its policies, and the registry of policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import numpy as np

from cluster.node_table import NodeTable
from gateway.scheduling.baselines import FirstFit, MostIdle, Random
from gateway.scheduling.dlora import Dlora
from gateway.scheduling.rank_aware import RankAware
from gateway.scheduling.request import RoutingRequest
from gateway.scheduling.toppings import Toppings

Clock = Callable[[], float]


class Policy(Protocol):
    """Routing policy: chooses one of the candidate nodes. The gateway and the simulator call the same policies."""

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:
        """Returns the row of the chosen candidate, or None to refuse the request.

        `candidates`: i64[C], C >= 1, the ascending rows of `nodes` that can serve the request. An implementation must
        not change `nodes`, and its cost must not grow with the number of adapters. It may keep state about its choice.
        """
        ...


class UnknownPolicy(ValueError):
    """No policy has this name."""


POLICIES: Mapping[str, Callable[[Clock, int], Policy]] = MappingProxyType(
    {
        "rank_aware": lambda clock, _: RankAware(clock),
        "toppings": lambda *_: Toppings(),
        "first_fit": lambda *_: FirstFit(),
        "random": lambda _, seed: Random(seed),
        "most_idle": lambda *_: MostIdle(),
        "dlora": lambda *_: Dlora(),
    }
)
"""Factories of policies, by name. Each takes a clock (seconds) and a seed."""


def make_policy(name: str, clock: Clock = time.monotonic, seed: int = 0) -> Policy:
    """Returns the policy with this name. Raises UnknownPolicy, which lists the known names."""
    if name not in POLICIES:
        raise UnknownPolicy(f"routing policy {name!r} does not exist; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](clock, seed)
