"""Starts the processes of CPU LoRA workers on cores near the GPU, and measures their costs."""

from __future__ import annotations

import logging
import os

from msgspec.structs import replace

from adapters.base_model import BaseModel
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.measure import SHORT, crosses_link, measure_cpu, measure_handoff, measure_layers
from node_agent.coldstart.profile import CpuLora, LinkCost, Profile, ProfileError
from node_agent.coldstart.setup import make_pool
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import EngineConfig
from node_agent.cores import spare_cores, usable_cores
from node_agent.engine.kv_blocks import BlockPool
from node_agent.gpu.numa import home_node, memory_near, nearest_first
from node_agent.sending_runner import SendingRunner
from node_agent.types import ModelRunner

log = logging.getLogger("garnish.engine")


def worker_cores(config: EngineConfig, count: int, threads: int) -> list[int]:
    """Returns the cores for up to `count` workers: those nearest to the GPU after the engine's `threads` cores."""
    if config.host_nodes > 1:
        return []
    allowed = os.sched_getaffinity(0)
    order = nearest_first(allowed, home_node(config.gpu, allowed))
    engine_cores = max(1, min(threads, usable_cores() - count))
    return spare_cores(engine_cores, order=order)[:count]


def check_count(config: EngineConfig, count: int, threads: int, refusal: str) -> None:
    """Raises ValueError if the node can't have `count` workers. `refusal`: why its other settings rule them out, or
    empty; `threads`: torch threads of the engine."""
    if refusal:
        raise ValueError(f"cpu_workers: {refusal}; set 0 or auto")
    cores = len(worker_cores(config, count, threads))
    if count > cores:
        raise ValueError(
            f"cpu_workers: {count} need a core each, and the engine's own leaves {cores}; set cpu_workers lower"
        )


def make_workers(config: EngineConfig, store: AdapterStore, base: BaseModel, count: int, threads: int) -> WorkerPool:
    """Returns an unstarted pool of up to `count` workers, with memory near the GPU. Raises ValueError,
    UnsupportedMachine."""
    allowed = os.sched_getaffinity(0)
    with memory_near(home_node(config.gpu, allowed), allowed):
        return make_pool(config, store, base, worker_cores(config, count, threads), threads)


def start_warm(pool: WorkerPool, limit_s: float) -> None:
    """Starts the workers and waits up to `limit_s` seconds until they are warm. Logs a warning if some are not."""
    pool.start()
    ready = pool.wait_ready(limit_s)
    if ready < pool.layout.workers:
        log.warning("some CPU workers are not warm yet", extra={"ready": ready, "workers": pool.layout.workers})


def measure_workers(store: AdapterStore, pool: WorkerPool) -> tuple[CpuLora | None, LinkCost | None]:
    """Returns the costs of a worker's slice and of a handoff. The first is None if no worker answered, or if handoffs
    could not be measured."""
    cpu = measure_cpu(store, pool, SHORT)
    if cpu is None or not crosses_link(pool):
        return cpu, None
    try:
        return cpu, measure_handoff(pool, store.pool.data.device, SHORT.rounds)
    except ProfileError as error:
        log.warning("handoffs could not be measured", extra={"reason": str(error)})
        return None, None


def prepare_handoffs(runner: ModelRunner, blocks: BlockPool, profile: Profile) -> Profile:
    """Prepares a GPU's runner for passes that hand layers to workers. Returns the profile with the layer times of such
    passes."""
    if isinstance(runner, SendingRunner):
        runner.capture_handoffs()
    return replace(profile, layer=measure_layers(runner, blocks, SHORT.tokens, SHORT.rounds, assisted=True))
