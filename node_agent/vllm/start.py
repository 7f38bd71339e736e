"""Start of vLLM's engine: its version, the plan of its memory, its arguments, and the checks once it runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from adapters.base_model import BaseModel
from adapters.base_sizes import BaseSizes, sizes_from_config, sizes_of_foreign
from cluster.device_memory import DeviceMemory
from node_agent.config import EngineConfig
from node_agent.vllm.arguments import check_version, engine_arguments
from node_agent.vllm.driver import AsyncEngine
from node_agent.vllm.engine import VllmTypes
from node_agent.vllm.memory import CPU_KV_BYTES, plan_node
from node_agent.vllm.self_check import TOLERANCES, check_rows
from node_agent.vllm.worker_extension import MEMORY_METHOD, WorkerMemory

log = logging.getLogger("garnish.engine")


class Start:
    """Starts vLLM's engine for a node's settings. Called once, in the thread that has vLLM's event loop."""

    def __init__(self, config: EngineConfig, base: BaseModel, stat_loggers: Sequence[Any] = ()) -> None:
        """`stat_loggers`: vLLM's loggers of statistics; prometheus_logger() needs vLLM's modules."""
        self._config, self._base, self._stat_loggers = config, base, stat_loggers
        self.arguments: dict[str, Any] = {}
        """arguments of vLLM's engine, once it was started"""
        self.memory: DeviceMemory
        """plan of each device's memory, then with the sizes that vLLM's workers measured"""

    def __call__(self) -> AsyncEngine:
        """Returns vLLM's engine, whose processes have loaded the base model. Raises ValueError for an unsupported
        version of vLLM, or if the base model and its adapters do not fit."""
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        check_version(vllm.__version__, self._config.vllm.any_version)
        on_cpu = current_platform.is_cpu()
        self.memory = self._plan(current_platform.get_device_total_memory(), on_cpu=on_cpu)
        arguments = engine_arguments(self._config, self.memory.slots, _targets(self._base))
        if on_cpu:  # by itself vLLM would take most of the host's memory
            arguments = {"kv_cache_memory_bytes": CPU_KV_BYTES} | arguments
        self.arguments = arguments
        log.info("device memory is planned", extra={"plan": str(self.memory)})
        engine: AsyncEngine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments),
            # vLLM's defaults for batches depend on the caller; without its name they are those of a small GPU.
            usage_context=UsageContext.OPENAI_API_SERVER,
            stat_loggers=list(self._stat_loggers),
        )
        return engine

    async def check(self, types: VllmTypes, engine: AsyncEngine) -> None:
        """Raises RowsMixed if vLLM does not keep the rows of a batch apart. Measures the workers' memory."""
        settings = settings_of(engine)
        await check_rows(engine, types, settings.model_config.get_vocab_size(), TOLERANCES[dtype_of(settings)])
        self.memory = with_measured(self.memory, await engine.collective_rpc(MEMORY_METHOD))

    def _plan(self, device: int, *, on_cpu: bool) -> DeviceMemory:
        config = self._config
        model: dict[str, Any] = json.loads((Path(config.model_dir) / "config.json").read_bytes())
        return plan_node(
            sizes_of(self._base, model),
            model,
            config.vllm,
            device=device,
            dtype=config.dtype,
            kv_memory=config.kv_memory,
            max_rows=config.max_rows,
            on_cpu=on_cpu,
        )


def sizes_of(base: BaseModel, config: dict[str, Any]) -> BaseSizes:
    """Returns the base model's sizes: from its manifest if it has one, else from its config.json."""
    return sizes_from_config(config) if base.foreign is None else sizes_of_foreign(base, base.foreign)


def with_measured(plan: DeviceMemory, workers: Sequence[WorkerMemory]) -> DeviceMemory:
    """Returns the plan with the sizes of the worker that holds the most."""
    slots = max(worker["slots"] for worker in workers)
    weights = max(worker["weights"] for worker in workers)
    log.info("device memory is measured", extra={"weights": weights, "slots": slots, "planned": str(plan)})
    return msgspec.structs.replace(plan, weights=weights or plan.weights, slot=slots // plan.slots)


def settings_of(engine: AsyncEngine) -> Any:
    """Returns vLLM's settings, as it completed them."""
    return engine.vllm_config  # type: ignore[attr-defined]


def dtype_of(settings: Any) -> str:
    return str(settings.model_config.dtype).removeprefix("torch.")


def _targets(base: BaseModel) -> Sequence[str]:
    """Returns the last names of the modules that adapters may change, so that vLLM reserves no memory for others.

    Returns none for a base that only vLLM serves, whose modules may have other names in vLLM.
    """
    if base.foreign is not None:
        return ()
    return list(dict.fromkeys(name.rpartition(".")[2] for name in base.modules.adaptable))
