"""More CPU workers than a host has cores: they share the cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from adapters.base_model import BaseModel
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart import setup
from node_agent.coldstart.engine_cores import EngineCores
from node_agent.coldstart.shared import DTYPES, Layout, WorkerConfig
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import EngineConfig

CORES = sorted(os.sched_getaffinity(0))
CROWD = 3


class CrowdedPool(WorkerPool):
    """A pool whose workers share this host's cores; the cores that it is made with are numbers."""

    def _worker_config(self, index: int, epoch: int) -> WorkerConfig:
        config = super()._worker_config(index, epoch)
        return msgspec.structs.replace(config, cores=(CORES[index % len(CORES)],))


def make_crowded_pool(
    config: EngineConfig, store: AdapterStore, base: BaseModel, cores: Sequence[int], threads: int
) -> WorkerPool:
    """Makes a pool of CROWD workers in the place of `worker_start.make_pool`."""
    dtype = DTYPES.index(store.pool.data.dtype)
    layout = Layout(setup.HANDOFF_SLOTS, CROWD, setup.max_tokens(config), base.widths, dtype)
    pool = CrowdedPool(store.host_map, layout, range(CROWD))
    pool.engine_cores = EngineCores(threads, cores)
    return pool
