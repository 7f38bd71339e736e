"""Starts what cold starts need on this node: the CPU LoRA workers, and the profile by which plans are chosen."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from adapters.base_model import BaseModel
from kernels.build import CompileError
from kernels.handoff_device import stream_kernels
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.cold_starts import WAYS
from node_agent.coldstart.measure import SHORT, measure
from node_agent.coldstart.profile import Profile, ProfileError, ProfileKey, check, read_profile, write_profile
from node_agent.coldstart.shared import DTYPES, Layout
from node_agent.coldstart.stream import BrokenHandoff, StreamPool
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import EngineConfig
from node_agent.cores import move_threads, spare_cores
from node_agent.device import device_name
from node_agent.engine.loop import Engine
from node_agent.types import GROUPS

log = logging.getLogger("garnish.engine")

START_LIMIT_S = 60.0
"""For the workers to be warm."""
MOST_WORKERS = 16
"""That `auto` starts: a prompt's slices fill no more."""
HANDOFF_SLOTS = 8
"""Handoffs that may be open or in quarantine at once."""
SPARE_SLOTS = 2
"""With a GPU: passes that may be ending or in quarantine beside those that are open."""


def cores_to_leave(config: EngineConfig) -> int:
    """That the engine does not compute on, where its threads are not given."""
    if config.cpu_workers is not None:
        return config.cpu_workers
    if config.host_nodes > 1:
        return 0
    return 1 if config.load_link is not None and "assist" in WAYS[config.cold_start].plans else 0


def start_workers(config: EngineConfig, store: AdapterStore, base: BaseModel, threads: int) -> WorkerPool | None:
    """The workers, warm; None where there are to be none. Raises ValueError when there can't be as many as asked for.

    `auto` starts none on a CPU whose adapters have no slow link to cross: there a load ends before a worker could help;
    none with a GPU, as long as no GPU has run the handoff; and none where other nodes compute on the same cores.
    """
    dtype = store.pool.data.dtype
    if "assist" not in WAYS[config.cold_start].plans or config.cpu_workers == 0:
        return None
    if config.cpu_workers is None and (config.load_link is None or config.host_nodes > 1):
        return None
    if config.host_nodes > 1:
        raise ValueError(
            f"cpu_workers: each needs a core of its own, and {config.host_nodes} nodes share this host's; set 0 or auto"
        )
    if dtype not in DTYPES:
        if config.cpu_workers:
            raise ValueError(f"cpu_workers: they compute in {' or '.join(map(str, DTYPES))}, not {dtype}; set 0")
        return None
    cores = spare_cores(threads)
    count = min(len(cores), MOST_WORKERS) if config.cpu_workers is None else config.cpu_workers
    if count > len(cores):
        raise ValueError(
            f"cpu_workers: {count} need a core each, and the engine's {threads} threads leave {len(cores)}; "
            "set cpu_workers lower"
        )
    if not count:
        return None
    workers = make_pool(config, store, base, cores[-count:])
    workers.memory.repeats = config.worker_repeats
    if config.worker_repeats > 1:
        log.warning("CPU workers are slowed: each repeats its work", extra={"repeats": config.worker_repeats})
    workers.start()
    os.sched_setaffinity(0, workers.other_cores)  # an armed worker gives nothing of its core
    if threads > 1:  # a team, which has come into being with the model
        move_threads(workers.all_cores, workers.other_cores)
    ready = workers.wait_ready(START_LIMIT_S)
    if ready < count:
        log.warning("some CPU workers are not warm yet", extra={"ready": ready, "workers": count})
    if ready and isinstance(workers, StreamPool):
        _check_handoff(workers)
    return workers


def make_pool(config: EngineConfig, store: AdapterStore, base: BaseModel, cores: Sequence[int]) -> WorkerPool:
    """Makes the pool of workers for the device on which the store's adapters are. Raises ValueError; on a CPU also
    UnsupportedMachine."""
    device, dtype = store.pool.data.device, DTYPES.index(store.pool.data.dtype)
    if device.type == "cpu":
        layout = Layout(HANDOFF_SLOTS, len(cores), config.chunk_tokens, base.widths, dtype)
        return WorkerPool(store.host_map, layout, cores)
    layout = stream_layout(config, base, len(cores), dtype)
    try:
        return StreamPool(store.host_map, layout, cores, device, stream_kernels(device))
    except (CompileError, RuntimeError) as error:
        raise ValueError(f"cpu_workers: {error}; set cpu_workers to 0") from error


def stream_layout(config: EngineConfig, base: BaseModel, workers: int, dtype: int) -> Layout:
    """Returns the layout of the handoffs' memory on a GPU: a slot for each open cold pass, and SPARE_SLOTS for ending
    ones; in each a step for each handoff that a pass can have. `dtype`: an index into DTYPES."""
    steps = base.num_layers * len(GROUPS)
    return Layout(config.max_cold + SPARE_SLOTS, workers, config.chunk_tokens, base.widths, dtype, steps)


def _check_handoff(workers: StreamPool) -> None:
    try:
        workers.check()
    except BrokenHandoff as error:
        workers.close()
        raise ValueError(f"cpu_workers: {error}; set cpu_workers to 0") from error


def profile_key(engine: Engine, config: EngineConfig, base: BaseModel, workers: WorkerPool | None) -> ProfileKey:
    link, device = config.load_link, engine.runner.device
    return ProfileKey(
        base=base.fingerprint,
        dtype=str(engine.runner.dtype).removeprefix("torch."),
        device=device_name(device),
        threads=torch.get_num_threads(),
        workers=0 if workers is None else workers.layout.workers,
        simulated_bandwidth=0.0 if link is None else link.bandwidth,
        simulated_latency=0.0 if link is None else link.latency,
        simulated_repeats=config.worker_repeats,
    )


def use_profile(engine: Engine, config: EngineConfig, base: BaseModel, workers: WorkerPool | None) -> None:
    """Let the engine plan its cold starts by what they cost here: as the file says, or measured now and written."""
    if engine.cold_start.way.plans == ("wait",):
        return
    key = profile_key(engine, config, base, workers)
    file = Path(config.profile) if config.profile else None
    profile = _from_file(file, key)
    if profile is None:
        profile = measure(key, engine.runner, engine.blocks, engine.store, workers, SHORT)
        _keep(profile, file)
    if workers is not None and profile.cpu is None:
        log.warning("cold starts go without CPU workers: none answered while they were measured")
        workers.close()
        move_threads(workers.other_cores, workers.all_cores)
        workers = None
    engine.cold_start.use(profile, workers)


def _keep(profile: Profile, file: Path | None) -> None:
    """Writes the profile for the next start, where it has a file; logs a failure, after which the next start measures
    again."""
    if file is None:
        return
    try:
        check(profile)  # a worker that did not answer just now may do so then
        write_profile(profile, file)
    except (ProfileError, OSError) as error:
        log.warning("the profile is not kept", extra={"reason": str(error)})


def _from_file(file: Path | None, key: ProfileKey) -> Profile | None:
    if file is None or not file.exists():
        return None
    try:
        return read_profile(file, key)
    except (ProfileError, OSError) as error:
        log.warning("the profile is measured again", extra={"reason": str(error)})
        return None
