"""Starts what cold starts need on this node: the CPU LoRA workers, and the profile by which plans are chosen."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from adapters.base_model import BaseModel
from cluster.json_file import write_json
from kernels.build import CompileError
from kernels.handoff_device import stream_kernels
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.auto_workers import TOO_SLOW, decide_workers, known_too_slow, workers_gain
from node_agent.coldstart.cold_starts import WAYS, WorkersDecision
from node_agent.coldstart.measure import SHORT, measure, measure_cpu, measure_handoff, measure_layers
from node_agent.coldstart.profile import Profile, ProfileError, ProfileKey, check, read_profile
from node_agent.coldstart.shared import DTYPES, Layout
from node_agent.coldstart.stream import BrokenHandoff, StreamPool
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import EngineConfig
from node_agent.cores import move_threads, spare_cores
from node_agent.device import device_name
from node_agent.engine.loop import Engine
from node_agent.gpu.numa import home_node, memory_near, nearest_first
from node_agent.types import GROUPS, SendingRunner

log = logging.getLogger("garnish.engine")

START_LIMIT_S = 60.0
"""For the workers to be warm."""
HANDOFF_SLOTS = 8
"""Handoffs that may be open or in quarantine at once."""
SPARE_SLOTS = 2
"""With a GPU: passes that may be ending or in quarantine beside those that are open."""


def set_up_cold_starts(engine: Engine, config: EngineConfig, base: BaseModel, threads: int) -> None:
    """Starts the CPU workers that the node is to have, and lets the engine plan its cold starts by what they cost here:
    as the profile's file says, or measured now and written. The engine is warm, and computes with `threads`.

    Raises ValueError when there can't be as many workers as asked for.
    """
    starts, store = engine.cold_start, engine.store
    _check_wanted(config, store, threads)
    if starts.way.plans == ("wait",):
        starts.decision = WorkersDecision(0, f"cold_start: {config.cold_start} has no use for them")
        return
    key = profile_key(engine, config, base)
    file = Path(config.profile) if config.profile else None
    kept = _from_file(file, key)
    profile = kept or measure(key, engine.runner, engine.blocks, store, None, SHORT)
    allowed = os.sched_getaffinity(0)
    home = home_node(config.gpu, allowed)
    cores = spare_cores(threads, order=nearest_first(allowed, home)) if config.host_nodes == 1 else []
    starts.decision = decide_workers(config, store, base, profile, len(cores))
    if known_too_slow(starts, config, profile):
        starts.decision = TOO_SLOW
    workers = None
    if starts.decision.count:
        with memory_near(home, allowed):
            workers = make_pool(config, store, base, cores[: starts.decision.count])
        _start_workers(config, threads, workers)
        profile = _with_workers(profile, store, workers)
        workers = _worth_keeping(engine, config, profile, workers)
        if isinstance(workers, StreamPool):
            profile = _with_handoffs(engine, kept, profile)
    if profile is not kept:
        _keep(profile, file)
    starts.use(profile, workers)
    log.info("CPU workers", extra={"workers": starts.decision.count, "reason": starts.decision.reason})


def _check_wanted(config: EngineConfig, store: AdapterStore, threads: int) -> None:
    """Raises ValueError when as many workers as are set can't be had."""
    if not config.cpu_workers or "assist" not in WAYS[config.cold_start].plans:
        return
    if config.host_nodes > 1:
        raise ValueError(
            f"cpu_workers: each needs a core of its own, and {config.host_nodes} nodes share this host's; set 0 or auto"
        )
    if store.pool.data.dtype not in DTYPES:
        raise ValueError(
            f"cpu_workers: they compute in {' or '.join(map(str, DTYPES))}, not {store.pool.data.dtype}; set 0"
        )
    cores = spare_cores(threads)
    if config.cpu_workers > len(cores):
        raise ValueError(
            f"cpu_workers: {config.cpu_workers} need a core each, and the engine's {threads} threads leave "
            f"{len(cores)}; set cpu_workers lower"
        )


def _start_workers(config: EngineConfig, threads: int, workers: WorkerPool) -> None:
    """Starts the workers, each on its core, and waits until they are warm. Raises ValueError when the handoff does not
    work."""
    workers.memory.repeats = config.worker_repeats
    if config.worker_repeats > 1:
        log.warning("CPU workers are slowed: each repeats its work", extra={"repeats": config.worker_repeats})
    workers.start()
    os.sched_setaffinity(0, workers.other_cores)  # an armed worker gives nothing of its core
    if threads > 1:  # a team, which has come into being with the model
        move_threads(workers.all_cores, workers.other_cores)
    ready = workers.wait_ready(START_LIMIT_S)
    if ready < workers.layout.workers:
        log.warning("some CPU workers are not warm yet", extra={"ready": ready, "workers": workers.layout.workers})
    if ready and isinstance(workers, StreamPool):
        _check_handoff(workers)


def _with_workers(profile: Profile, store: AdapterStore, workers: WorkerPool) -> Profile:
    """Returns the profile with what these workers cost; as it is, where it has that already."""
    count = workers.layout.workers
    if profile.cpu is not None and profile.key.workers == count:
        return profile
    cpu = measure_cpu(store, workers, SHORT)
    handoff = measure_handoff(workers, SHORT.rounds) if cpu is not None and isinstance(workers, StreamPool) else None
    return replace(profile, key=replace(profile.key, workers=count), cpu=cpu, handoff=handoff)


def _with_handoffs(engine: Engine, kept: Profile | None, profile: Profile) -> Profile:
    """Has the runner prepare passes whose layers are handed over to workers. Returns the profile with what a layer of
    such a pass takes, unless it is the one that was `kept`, which has that."""
    if isinstance(engine.runner, SendingRunner):
        engine.runner.capture_handoffs()
    if profile is kept:
        return profile
    return replace(profile, layer=measure_layers(engine.runner, engine.blocks, SHORT, assisted=True))


def _worth_keeping(engine: Engine, config: EngineConfig, profile: Profile, workers: WorkerPool) -> WorkerPool | None:
    """Returns the workers; None, and they have ended, where none answers, or where `auto` sees no use for such slow
    ones."""
    starts = engine.cold_start
    if profile.cpu is None:
        log.warning("cold starts go without CPU workers: none answered while they were measured")
        starts.decision = WorkersDecision(0, "none answered while they were measured")
    else:
        starts.use(profile, workers)
        if config.cpu_workers is not None or workers_gain(starts, config, profile, workers.usable):
            return workers
        starts.decision = TOO_SLOW
    workers.close()
    move_threads(workers.other_cores, workers.all_cores)
    return None


def make_pool(config: EngineConfig, store: AdapterStore, base: BaseModel, cores: Sequence[int]) -> WorkerPool:
    """Makes the pool of workers for the device on which the store's adapters are. Raises ValueError; on a CPU also
    UnsupportedMachine."""
    device, dtype = store.pool.data.device, DTYPES.index(store.pool.data.dtype)
    if device.type == "cpu":
        layout = Layout(
            HANDOFF_SLOTS, len(cores), most_tokens(config), base.widths, dtype, spares=spare_workers(len(cores))
        )
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
    slots, spares = config.max_cold + SPARE_SLOTS, spare_workers(workers)
    return Layout(slots, workers, most_tokens(config), base.widths, dtype, steps, spares)


def most_tokens(config: EngineConfig) -> int:
    """Returns how many tokens one handoff can have: a prompt's chunk, or the rows of a step that join it."""
    return max(config.chunk_tokens, config.max_rows)


def spare_workers(workers: int) -> int:
    """Returns how many redundant workers wait beside so many. Where there is one worker alone, a failure costs the same
    pass as it does with a spare one, which would double what workers take of the host."""
    return int(workers > 1)


def _check_handoff(workers: StreamPool) -> None:
    try:
        workers.check()
    except BrokenHandoff as error:
        workers.close()
        raise ValueError(f"cpu_workers: {error}; set cpu_workers to 0") from error


def profile_key(engine: Engine, config: EngineConfig, base: BaseModel, workers: int = 0) -> ProfileKey:
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


def _keep(profile: Profile, file: Path | None) -> None:
    """Writes the profile for the next start, where it has a file; logs a failure, after which the next start measures
    again."""
    if file is None:
        return
    try:
        check(profile)  # a worker that did not answer just now may do so then
        write_json(profile, file)
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
