"""The seam between placement and its policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from cluster.state import NodeView
from gateway.scheduling.least_loaded import LeastLoaded
from gateway.scheduling.request import PlacementRequest


class Policy(Protocol):
    """Chooses one of the candidates, all of which are able to serve the request; None refuses them all."""

    def choose(self, candidates: Sequence[NodeView], request: PlacementRequest) -> str | None: ...


class UnknownPolicy(ValueError):
    """No policy of that name."""


POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType({"least_loaded": LeastLoaded})


def make_policy(name: str) -> Policy:
    """Raises UnknownPolicy with the names that exist."""
    if name not in POLICIES:
        raise UnknownPolicy(f"placement policy {name!r} does not exist; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
