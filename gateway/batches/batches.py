"""The files and batches of all tenants, as one gateway worker has them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic

from prometheus_client import CollectorRegistry

from adapters.store import ObjectStore
from cluster.state import ClusterState
from gateway.batches.files import FileStore
from gateway.batches.records import BatchStore
from gateway.batches.runner import BatchRunner
from gateway.batches.spare import SpareRows
from gateway.catalog.callers import Callers


@dataclass(frozen=True)
class Batches:
    """`runner` runs those of all tenants that no other gateway does."""

    files: FileStore
    records: BatchStore
    runner: BatchRunner


def make_batches(
    store: ObjectStore,
    cluster: ClusterState,
    callers: Callers,
    *,
    base: str,
    name: str,
    registry: CollectorRegistry,
    unix: Callable[[], Awaitable[float]],
) -> Batches:
    """`base`: fingerprint of the base model; `name`: the worker's, among all gateways'; `registry`: of its metrics;
    `unix`: Unix time by the store's clock."""
    files, records, rows = FileStore(store), BatchStore(store), SpareRows(monotonic)

    async def spare(in_flight: int) -> float:
        return rows.count(await cluster.table(), base, in_flight)

    runner = BatchRunner(records, files, callers, name=name, spare=spare, registry=registry, clock=monotonic, unix=unix)
    return Batches(files, records, runner)
