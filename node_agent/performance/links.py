"""Cost of reads from the object store, measured by reading existing artifacts."""

from __future__ import annotations

from adapters.artifact import artifact_key
from adapters.base_model import BaseModel
from adapters.open_store import open_store
from cluster.performance_model import Transfer
from node_agent.config import EngineConfig
from node_agent.performance.reads import LOOKED_AT, measure_reads


def measure_store(config: EngineConfig, base: BaseModel) -> Transfer | None:
    """Returns the cost of ranged reads from the store, measured with an artifact of this base model. Returns None if
    the store has none yet, or if the times do not depend on the size. Raises StoreUnavailable."""
    objects = open_store(config.registry)
    return measure_reads(objects, objects.list(artifact_key(base.fingerprint, ""), limit=LOOKED_AT))
