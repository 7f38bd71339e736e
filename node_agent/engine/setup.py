"""Builds an engine from its settings, and warms it up."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace

from adapters.base_model import BaseModel, check_own_engine, load_base_model, read_family_config
from adapters.open_store import open_store
from cluster.messages import GenerateRequest, Sampling
from cluster.text import end_token_ids
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.cold_starts import MODES, ColdStarts
from node_agent.coldstart.worker_manager import WorkerManager
from node_agent.config import RUNNERS, EngineConfig, default_adapter_memory, pass_memory
from node_agent.cores import core_share
from node_agent.device import DTYPES, free_memory, gpu_memory, pick_device
from node_agent.engine.grammars import Grammars
from node_agent.engine.limits import Limits
from node_agent.engine.loop import Engine
from node_agent.engine.reserves import Callers
from node_agent.gpu.numa import home_node, memory_near
from node_agent.ipc import Finished
from node_agent.runner.lora_choice import choose_lora, kernel_of
from node_agent.types import OpenRunner, RunnerSettings

SMALL_MODEL_BYTES = 8 << 20
PREPARED_PRODUCTS = 16384
"""Number of shapes for which oneDNN caches generated kernels; an uncached shape costs a millisecond per use.

oneDNN's default of 1,024 is too small. Prompts of different lengths with adapters of different ranks, whose rows are
split at page borders, have more shapes.
"""


MAX_CPU_KV_BYTES = 1 << 30
CPU_KV_PART = 4
"""Divisor: 1/n of a host's free memory is for keys and values, since other programs use it too."""


BY_DEVICE = {
    "cpu": {"max_rows": 32, "max_cold": 2, "chunk_tokens": 512},
    "cuda": {"max_rows": 256, "max_cold": 4, "chunk_tokens": 2048},
}
"""Default limits of passes (EngineConfig), by type of device.

A GPU reads the base model's weights once per pass, for 256 rows as for one, and 2,048 prompt tokens keep it busy. On a
CPU a pass of that size would delay all other requests' next tokens.
"""


class WarmUpFailed(RuntimeError):
    """Raised when the dummy request did not end as expected, so that the node is not ready."""


def build_engine(
    config: EngineConfig, on_change: Callable[[], None], open_runner: OpenRunner | None = None
) -> tuple[Engine, BaseModel]:
    """Loads the base model, allocates the pools, warms up, and returns the engine and the base. `open_runner` replaces
    the runner in `config`.

    Raises ValueError or OSError on bad settings.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PREPARED_PRODUCTS))  # read at the first matrix product
    device = pick_device(config.device)
    config, kernel = with_sizes(config, device), kernel_of(config.lora_kernel, device)
    threads = config.threads or default_threads(Path(config.model_dir), config.host_nodes)
    torch.set_num_threads(threads)
    base = load_base_model(Path(config.model_dir), config.base_id)
    check_own_engine(Path(config.model_dir), read_family_config(Path(config.model_dir)))
    if config.dtype != "auto" and config.dtype not in DTYPES:
        raise ValueError(f"dtype: {config.dtype!r} is unknown; use auto, {', '.join(DTYPES)}")
    settings = RunnerSettings(
        model_dir=Path(config.model_dir),
        device=device,
        dtype=DTYPES.get(config.dtype),
        block_tokens=config.block_tokens,
        num_blocks=partial(kv_blocks, config, base, device),
    )
    runner = (open_runner or find_runner(config.runner))(settings)
    cores = os.sched_getaffinity(0)
    with memory_near(home_node(config.gpu, cores), cores):
        store = AdapterStore(config, open_store(config.registry), base, device, runner.dtype, on_change)
    capacity = (runner.num_blocks - 1) * config.block_tokens
    limits = Limits(
        max_context=min(base.max_context, capacity),
        vocab_size=base.vocab_size,
        max_rows=config.max_rows,
        max_cold=config.max_cold,
        chunk_tokens=config.chunk_tokens,
        queue_limit=config.queue_limit,
        prefix_cache=config.prefix_cache == "auto",
        prefetch_waste=config.prefetch_waste if config.prefetch == "auto" else None,
    )
    lora = choose_lora(limits, runner, store, kernel)
    starts, eos_ids = ColdStarts(store, base, MODES[config.cold_start]), end_token_ids(Path(config.model_dir))
    engine = Engine(limits, runner, store, starts, eos_ids, lora, on_change)
    engine.grammars = Grammars(Path(config.model_dir) / "tokenizer.json", base.vocab_size, eos_ids, on_change)
    warm_up(engine)
    engine.worker_manager = WorkerManager(engine, config, base, threads)
    engine.worker_manager.start()
    return engine, base


def with_sizes(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Returns the settings with each 0 that means a device's default replaced by that default."""
    adapter_memory = config.adapter_memory or default_adapter_memory(gpu_memory(device))
    bounds = {name: getattr(config, name) or size for name, size in BY_DEVICE[device.type].items()}
    return replace(config, adapter_memory=adapter_memory, **bounds)


def kv_blocks(config: EngineConfig, base: BaseModel, device: torch.device, dtype: torch.dtype) -> int:
    """Returns the number of KV blocks of this dtype that fit. Must be called after the base model is loaded. Raises
    ValueError when it is below two."""
    size, how = config.kv_memory, ""
    if size is None:
        size, how = _kv_room(config.adapter_memory, device)
    per_block = base.kv_elements * dtype.itemsize * config.block_tokens
    blocks = size // per_block
    if blocks < 2:
        raise ValueError(
            f"kv_memory: {size} bytes{how} hold {blocks} blocks of {per_block} bytes; at least 2 are needed"
        )
    return int(blocks)


def _kv_room(adapters: int, device: torch.device) -> tuple[int, str]:
    """Returns the bytes for the KV cache, and a text that explains them. `adapters`: bytes that will be allocated later
    for adapters."""
    free, total = free_memory(device), gpu_memory(device)
    if total is None:
        return min(max(0, free - adapters) // CPU_KV_PART, MAX_CPU_KV_BYTES), ""
    passes = pass_memory(total)
    room = max(0, free - adapters - passes)
    return room, f" (of {free} free on the GPU, less {adapters} of adapter_memory and {passes} for passes)"


def find_runner(name: str) -> OpenRunner:
    """Returns the function that opens the runner of that name. Raises ValueError for a name that is not in RUNNERS."""
    module = RUNNERS.get(name)
    if module is None:
        raise ValueError(f"runner: {name!r} is unknown; use {', '.join(RUNNERS)}")
    open_runner: OpenRunner = importlib.import_module(module).open_runner
    return open_runner


def default_threads(model_dir: Path, host_nodes: int = 1) -> int:
    """Returns the engine's number of threads: this node's share of the usable cores, or 1 for a model that fits in a
    core's cache.

    For such a model a second thread gains nothing. On a busy host, threads that spin for each other lengthen a step
    many times.
    """
    weights = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return 1 if weights < SMALL_MODEL_BYTES else core_share(host_nodes)


def warm_up(engine: Engine) -> None:
    """Runs a dummy prefill and decode, so that the first request does not pay for lazy initialisation. Raises
    WarmUpFailed when they fail."""
    engine.submit(
        GenerateRequest("warm-up", "", "", [1] * 8, 3, Sampling(temperature=0), timeout=300.0, ignore_eos=True)
    )
    while engine.busy:
        engine.step()
    last = engine.take_events()[-1]
    if not isinstance(last, Finished) or last.reason != "length":
        raise WarmUpFailed(f"the dummy request ended with {last}")
    engine.scheduler.callers = Callers()  # reserve nothing for the dummy's tenant
