"""Status of each pool for `garnish infra show`: the desired size, the nodes, and the drift."""

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
    max: int
    applied: int | None
    nodes: dict[str, str] = {}
    """state of each node at the gateway, by node id

    A local pool has all its nodes here, including those that are not in Terraform's state. A local node is `dead` if
    its process has ended, and `alive` if the gateway has no state for it. A pool in AWS has the nodes here that report
    to the gateway.
    """
    drift: list[str] = []


class Observed(msgspec.Struct, frozen=True):
    """Current facts about the pools, from Terraform's state, this host and the gateway."""

    applied: Mapping[str, Any]
    managed: Collection[str]
    tainted: Collection[str]
    alive: Collection[str]
    states: Mapping[str, str]


def pool_statuses(stack: Stack, observed: Observed) -> list[PoolStatus]:
    """Returns the status of the declared pools in the file's order, then of undeclared pools that still exist."""
    applied, local = observed.applied, {*observed.managed, *observed.alive}
    undeclared = {*applied, *map(pool_of, local)} - {pool.name for pool in stack.pools}
    return [
        *(_declared(pool, applied.get(pool.name), observed, local) for pool in stack.pools),
        *(_undeclared(name, applied.get(name), local) for name in sorted(undeclared)),
    ]


def format_size(pool: Pool) -> str:
    """Returns the text for a pool whose size was set by the autoscaler and differs from the service file."""
    return f"the autoscaler has set {pool.desired}, serverless.yml says {pool.stated}"


def is_instance(node: str, pool: str) -> bool:
    """Returns True if `node` is the id of a node of the AWS pool `pool`: POOL-INSTANCE-..."""
    return node.startswith(f"{pool}-i-")


def _declared(pool: Pool, applied: Mapping[str, Any] | None, observed: Observed, local: Collection[str]) -> PoolStatus:
    if pool.backend == "aws":
        nodes = {node: state for node, state in observed.states.items() if is_instance(node, pool.name)}
        drift = []
    else:
        names = _nodes_of(pool.name, local)
        nodes = {name: observed.states.get(name, "alive") if name in observed.alive else "dead" for name in names}
        drift = [problem for name in names if (problem := _wrong(name, applied, observed))]
    if applied is None:
        drift.append("not applied yet")
    elif applied["desired"] != pool.desired:
        drift.append(f"desired is {pool.desired}, applied {applied['desired']}")
    if pool.stated is not None:
        drift.append(format_size(pool))
    return PoolStatus(
        pool=pool.name, backend=pool.backend, min=pool.min, desired=pool.desired, max=pool.max,
        applied=applied["desired"] if applied else None, nodes=nodes, drift=drift,
    )  # fmt: skip


def _wrong(node: str, applied: Mapping[str, Any] | None, observed: Observed) -> str | None:
    if node not in observed.managed:
        return f"{node} runs, and no state holds it"
    if applied is not None and node not in applied.get("nodes", ()):
        return f"{node} was to go, and its end broke off"
    if node not in observed.alive:
        return f"{node} has died"
    return f"{node}: {BROKEN_OFF}" if node in observed.tainted else None


def _undeclared(name: str, applied: Mapping[str, Any] | None, local: Collection[str]) -> PoolStatus:
    return PoolStatus(
        pool=name, backend=applied["backend"] if applied else "local", min=0, desired=0, max=0,
        applied=applied["desired"] if applied else None, nodes=dict.fromkeys(_nodes_of(name, local), "undeclared"),
        drift=["no longer declared"],
    )  # fmt: skip


def _nodes_of(pool: str, local: Collection[str]) -> list[str]:
    return sorted((node for node in local if pool_of(node) == pool), key=lambda node: (len(node), node))
