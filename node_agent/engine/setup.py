"""Builds an engine from its settings, and warms it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from adapters.base_model import BaseModel, load_base_model
from adapters.open_store import open_store
from cluster.messages import GenerateRequest, Sampling
from cluster.text import end_token_ids
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.cold_starts import WAYS, ColdStarts
from node_agent.coldstart.setup import set_up_cold_starts
from node_agent.config import RUNNERS, EngineConfig
from node_agent.cores import core_share
from node_agent.device import DTYPES, pick_device
from node_agent.engine.limits import Limits
from node_agent.engine.loop import Engine
from node_agent.engine.reserves import Callers
from node_agent.engine.sizes import kv_blocks, with_sizes
from node_agent.gpu.numa import home_node, memory_near
from node_agent.ipc import Finished
from node_agent.runner.lora_choice import choose_lora, kernel_of
from node_agent.types import OpenRunner, RunnerSettings

SMALL_MODEL = 8 << 20
"""Bytes of weights."""
PREPARED_PRODUCTS = 16384
"""Shapes for which torch's CPU library keeps what it has generated. By itself it keeps 1,024: fewer than prompts of
some lengths have with adapters of some ranks, whose rows are cut at page borders, and each costs a millisecond anew."""


class WarmUpFailed(RuntimeError):
    """The dummy request did not end as it must; the node is not ready."""


def build_engine(
    config: EngineConfig, on_change: Callable[[], None], open_runner: OpenRunner | None = None
) -> tuple[Engine, BaseModel]:
    """Load the base model, allocate the pools and warm up. `open_runner`: instead of the one that `config` names.

    Raises ValueError or OSError on bad settings.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PREPARED_PRODUCTS))  # read at the first product
    device = pick_device(config.device)
    config, kernel = with_sizes(config, device), kernel_of(config.lora_kernel, device)
    threads = config.threads or default_threads(Path(config.model_dir), config.cpu_workers or 0, config.host_nodes)
    torch.set_num_threads(threads)
    base = load_base_model(Path(config.model_dir), config.base_id)
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
    starts, eos_ids = ColdStarts(store, base, WAYS[config.cold_start]), end_token_ids(Path(config.model_dir))
    engine = Engine(limits, runner, store, starts, eos_ids, lora, on_change)
    warm_up(engine)
    set_up_cold_starts(engine, config, base, threads)
    return engine, base


def find_runner(name: str) -> OpenRunner:
    """Returns what opens the runner of that name. Raises ValueError for a name that is not in RUNNERS."""
    module = RUNNERS.get(name)
    if module is None:
        raise ValueError(f"runner: {name!r} is unknown; use {', '.join(RUNNERS)}")
    found: OpenRunner = importlib.import_module(module).open_runner
    return found


def default_threads(model_dir: Path, left: int = 0, host_nodes: int = 1) -> int:
    """This node's share of the cores that the process may use, less those that are `left` to workers; one for a model
    that lies in a core's own cache.

    There a second thread gains nothing, and on a busy host threads that spin for each other cost a step many times
    its length.
    """
    weights = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    return 1 if weights < SMALL_MODEL else max(1, core_share(host_nodes) - left)


def warm_up(engine: Engine) -> None:
    """Runs a dummy prefill and decode, so that the first caller does not pay for lazy initialisation. Raises
    WarmUpFailed when they fail."""
    engine.submit(
        GenerateRequest("warm-up", "", "", [1] * 8, 3, Sampling(temperature=0), timeout=300.0, ignore_eos=True)
    )
    while engine.busy:
        engine.step()
    last = engine.take_events()[-1]
    if not isinstance(last, Finished) or last.reason != "length":
        raise WarmUpFailed(f"the dummy request ended with {last}")
    engine.scheduler.callers = Callers()  # no place is kept for the dummy's tenant
