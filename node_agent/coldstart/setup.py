"""Creates the pool of CPU LoRA workers for a node's device, and the key of its profile."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from adapters.base_model import BaseModel
from kernels.build import CompileError
from kernels.handoff_device import CudaKernels
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.engine_cores import EngineCores
from node_agent.coldstart.handoff_link import HandoffLink
from node_agent.coldstart.profile import ProfileKey
from node_agent.coldstart.shared import DTYPES, Layout
from node_agent.coldstart.stream import BrokenHandoff, StreamPool
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import EngineConfig
from node_agent.device import device_name
from node_agent.engine.loop import Engine
from node_agent.types import GROUPS

log = logging.getLogger("garnish.engine")

HANDOFF_SLOTS = 8
SPARE_SLOTS = 2
"""Additional handoff slots on a GPU, for passes that are ending or whose workers have not answered."""


def make_pool(
    config: EngineConfig, store: AdapterStore, base: BaseModel, cores: Sequence[int], threads: int
) -> WorkerPool:
    """Creates the pool of workers for the device of the store's adapters. `threads`: torch threads of the engine while
    no worker is armed. Raises ValueError, and on a CPU UnsupportedMachine."""
    make = _cpu_pool if store.pool.data.device.type == "cpu" else _stream_pool
    pool = make(config, store, base, cores)
    pool.memory.repeats = config.worker_repeats
    if config.worker_repeats > 1:
        log.warning("CPU workers are slowed: each repeats its work", extra={"repeats": config.worker_repeats})
    pool.engine_cores = EngineCores(threads, cores)
    if store.simulated_link is not None:
        pool.link = HandoffLink(store.loader.device_link, store.loader.add_crossed)
    return pool


def _cpu_pool(config: EngineConfig, store: AdapterStore, base: BaseModel, cores: Sequence[int]) -> WorkerPool:
    dtype, spares = DTYPES.index(store.pool.data.dtype), spare_workers(len(cores))
    layout = Layout(HANDOFF_SLOTS, len(cores), max_tokens(config), base.widths, dtype, spares=spares)
    return WorkerPool(store.host_map, layout, cores)


def _stream_pool(config: EngineConfig, store: AdapterStore, base: BaseModel, cores: Sequence[int]) -> StreamPool:
    device = store.pool.data.device
    layout = stream_layout(config, base, len(cores), DTYPES.index(store.pool.data.dtype))
    try:
        return StreamPool(store.host_map, layout, cores, device, CudaKernels(device))
    except (CompileError, RuntimeError) as error:
        raise ValueError(f"cpu_workers: {error}; set cpu_workers to 0") from error


def stream_layout(config: EngineConfig, base: BaseModel, workers: int, dtype: int) -> Layout:
    """Returns the layout of the handoff memory on a GPU. It has one slot for each open cold pass, and SPARE_SLOTS more.
    Each slot has room for every possible handoff of a pass. `dtype`: index into DTYPES."""
    steps = base.num_layers * len(GROUPS)
    slots, spares = config.max_cold + SPARE_SLOTS, spare_workers(workers)
    return Layout(slots, workers, max_tokens(config), base.widths, dtype, steps, spares)


def max_tokens(config: EngineConfig) -> int:
    """Returns the maximum tokens of one handoff: a prompt chunk, or the rows of a step that join it."""
    return max(config.chunk_tokens, config.max_rows)


def spare_workers(workers: int) -> int:
    """Returns the number of spare workers for `workers` others. A single worker gets no spare: a failure would cost the
    same pass anyway, and a spare would double the workers' share of the host."""
    return int(workers > 1)


def check_handoff(workers: StreamPool) -> None:
    """Tests a handoff with random rows. If they arrive changed, closes the workers and raises ValueError."""
    try:
        workers.check()
    except BrokenHandoff as error:
        workers.close()
        raise ValueError(f"cpu_workers: {error}; set cpu_workers to 0") from error


def profile_key(engine: Engine, config: EngineConfig, base: BaseModel, workers: int = 0) -> ProfileKey:
    """Returns the conditions that a cold-start profile of this engine depends on."""
    link, device = config.load_link, engine.runner.device
    return ProfileKey(
        base=base.fingerprint,
        dtype=str(engine.runner.dtype).removeprefix("torch."),
        device=device_name(device),
        threads=torch.get_num_threads(),
        workers=workers,
        simulated_bandwidth=0.0 if link is None else link.bandwidth,
        simulated_latency=0.0 if link is None else link.latency,
        simulated_repeats=config.worker_repeats,
        runner=engine.runner.name,
    )
