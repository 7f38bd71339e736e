"""Cost of reads from the object store, measured by reading existing artifacts."""

from __future__ import annotations

import time

from adapters.artifact import artifact_key
from adapters.base_model import BaseModel
from adapters.open_store import open_store
from cluster.node_table import ASSUMED
from cluster.performance_fit import BadFit, BadSample, TransferSample, fit_transfer
from cluster.performance_model import Transfer
from node_agent.config import EngineConfig, LinkConfig

LOOKED_AT = 50
"""Number of artifacts listed; the largest of them is read."""
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of each measured read, limited by the artifact's size."""
ROUNDS = 3


def store_transfer(measured: Transfer | None, link: LinkConfig | None) -> Transfer:
    """Returns the published cost of the store: the measured cost plus that of a simulated link. Without a measurement,
    returns the simulated link's cost, or else a default."""
    if link is None:
        return measured or ASSUMED.from_store
    if measured is None:
        return Transfer(link.latency, link.bandwidth)
    return Transfer(measured.latency + link.latency, 1 / (1 / measured.bandwidth + 1 / link.bandwidth))


def measure_store(config: EngineConfig, base: BaseModel) -> Transfer | None:
    """Returns the cost of ranged reads from the store, measured with an artifact of this base model. Returns None if
    the store has none yet, or if the times do not depend on the size. Raises StoreUnavailable."""
    objects = open_store(config.registry)
    artifacts = objects.list(artifact_key(base.fingerprint, ""), limit=LOOKED_AT)
    if not artifacts:
        return None
    largest = max(artifacts, key=lambda info: info.size)
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
