"""What `garnish infra show` tells of each pool: what is desired, what lives, and where the two differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from infra.changes import BROKEN_OFF
from infra.stack import Pool, Stack, pool_of


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    pool: str
    backend: str
    min: int
    desired: int
    """As serverless.yml says now, or as the autoscaler has set."""
    max: int
    applied: int | None
    """As was last applied; None: the pool was never made."""
    nodes: dict[str, str] = {}
    """States as the gateway sees them. Of a local pool all its nodes, those included that the state does not hold:
    `alive` where that can't be asked, or `dead`. Of one in AWS those that report to the gateway."""
    drift: list[str] = []


class Seen(msgspec.Struct, frozen=True):
    """What there is now, as Terraform's state, this host and the gateway tell."""

    applied: Mapping[str, Any]
    """Pools, as they were applied: an output of Terraform's state."""
    held: Collection[str]
    """Ids of local nodes in the state."""
    tainted: Collection[str]
    """Of them those whose creation broke off."""
    alive: Collection[str]
    """Ids of local nodes whose process lives."""
    states: Mapping[str, str]
    """By node, as the gateway sees them."""


def pool_statuses(stack: Stack, seen: Seen) -> list[PoolStatus]:
    """Returns the status of the declared pools in the file's order, then of those that are no longer declared and still
    there."""
    applied, local = seen.applied, {*seen.held, *seen.alive}
    undeclared = {*applied, *map(pool_of, local)} - {pool.name for pool in stack.pools}
    return [
        *(_declared(pool, applied.get(pool.name), seen, local) for pool in stack.pools),
        *(_undeclared(name, applied.get(name), local) for name in sorted(undeclared)),
    ]


def size_told(pool: Pool) -> str:
    """Returns the text that says that the autoscaler has set a pool's size to another than the file's."""
    return f"the autoscaler has set {pool.desired}, serverless.yml says {pool.stated}"


def is_instance(node: str, pool: str) -> bool:
    """Whether a node of an aws pool calls itself so: POOL-INSTANCE-..."""
    return node.startswith(f"{pool}-i-")


def _declared(pool: Pool, applied: Mapping[str, Any] | None, seen: Seen, local: Collection[str]) -> PoolStatus:
    if pool.backend == "aws":
        nodes = {node: state for node, state in seen.states.items() if is_instance(node, pool.name)}
        drift = []
    else:
        names = _nodes_of(pool.name, local)
        nodes = {name: seen.states.get(name, "alive") if name in seen.alive else "dead" for name in names}
        drift = [told for name in names if (told := _wrong(name, applied, seen))]
    if applied is None:
        drift.append("not applied yet")
    elif applied["desired"] != pool.desired:
        drift.append(f"desired is {pool.desired}, applied {applied['desired']}")
    if pool.stated is not None:
        drift.append(size_told(pool))
    return PoolStatus(
        pool=pool.name, backend=pool.backend, min=pool.min, desired=pool.desired, max=pool.max,
        applied=applied["desired"] if applied else None, nodes=nodes, drift=drift,
    )  # fmt: skip


def _wrong(node: str, applied: Mapping[str, Any] | None, seen: Seen) -> str | None:
    if node not in seen.held:
        return f"{node} runs, and no state holds it"
    if applied is not None and node not in applied.get("nodes", ()):
        return f"{node} was to go, and its end broke off"
    if node not in seen.alive:
        return f"{node} has died"
    return f"{node}: {BROKEN_OFF}" if node in seen.tainted else None


def _undeclared(name: str, applied: Mapping[str, Any] | None, local: Collection[str]) -> PoolStatus:
    return PoolStatus(
        pool=name, backend=applied["backend"] if applied else "local", min=0, desired=0, max=0,
        applied=applied["desired"] if applied else None, nodes=dict.fromkeys(_nodes_of(name, local), "undeclared"),
        drift=["no longer declared"],
    )  # fmt: skip


def _nodes_of(pool: str, local: Collection[str]) -> list[str]:
    return sorted((node for node in local if pool_of(node) == pool), key=lambda node: (len(node), node))
