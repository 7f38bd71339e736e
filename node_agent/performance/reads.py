"""Cost of reads from the object store."""

from __future__ import annotations

import time
from collections.abc import Sequence

from adapters.store import ObjectInfo, ObjectStore
from cluster.node_table import ASSUMED
from cluster.performance_fit import BadFit, BadSample, TransferSample, fit_transfer
from cluster.performance_model import Transfer
from node_agent.config import LinkConfig

LOOKED_AT = 50
"""Number of objects listed; the largest of them is read."""
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of each measured read, limited by the object's size."""
ROUNDS = 3


def store_transfer(measured: Transfer | None, link: LinkConfig | None) -> Transfer:
    """Returns the published cost of the store: the measured cost plus that of a simulated link. Without a measurement,
    returns the simulated link's cost, or else a default."""
    if link is None:
        return measured or ASSUMED.from_store
    if measured is None:
        return Transfer(link.latency, link.bandwidth)
    return Transfer(measured.latency + link.latency, 1 / (1 / measured.bandwidth + 1 / link.bandwidth))


def measure_reads(objects: ObjectStore, listed: Sequence[ObjectInfo]) -> Transfer | None:
    """Returns the cost of ranged reads, measured with the largest of the listed objects. Returns None if there are
    none, or if the times do not depend on the size. Raises StoreUnavailable."""
    if not listed:
        return None
    largest = max(listed, key=lambda info: info.size)
    buffer = bytearray(min(largest.size, SIZES[-1]))
    samples = []
    for _ in range(ROUNDS):
        for size in sorted({min(size, len(buffer)) for size in SIZES}):
            started_at = time.perf_counter()
            objects.get_range_into(largest.key, 0, memoryview(buffer)[:size])
            samples.append(TransferSample(size, time.perf_counter() - started_at))
    try:
        return fit_transfer(samples)
    except (BadFit, BadSample):
        return None
