"""Policies by name: those of the gateway, and those that only a simulation can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from garnish.simulation.oracle import Oracle
from gateway.config import GatewayConfig
from gateway.scheduling.policy import POLICIES, Policy, UnknownPolicy, make_policy

Clock = Callable[[], float]
SIMULATED: Mapping[str, Callable[[Clock], Policy]] = MappingProxyType({"oracle": Oracle})


def default_policy() -> str:
    """Returns the name of the policy that the gateway has by default."""
    return str(next(field.default for field in msgspec.structs.fields(GatewayConfig) if field.name == "policy"))


def policy_names() -> list[str]:
    return sorted([*POLICIES, *SIMULATED])


def policy_maker(name: str, seed: int) -> Callable[[Clock], Policy]:
    """Returns the function that makes the policy with the simulation's clock. Raises UnknownPolicy with the names that
    exist."""
    if name in SIMULATED:
        return SIMULATED[name]
    if name not in POLICIES:
        raise UnknownPolicy(f"placement policy {name!r} does not exist; known: {', '.join(policy_names())}")
    return lambda clock: make_policy(name, clock, seed)
