"""The engine process of a node with vLLM: drives vLLM in process, and exchanges node_agent.ipc messages with the API
process over one Unix socket. It runs in the environment that has vLLM, and needs neither torch nor transformers of the
node's own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from node_agent.vllm.logs import set_up_environment, take_logs
from node_agent.vllm.spawned import begin_spawned

if __name__ == "__mp_main__":
    begin_spawned()

from adapters.base_manifest import NoManifest, base_from_manifest, find_base
from adapters.base_model import BaseModel
from adapters.base_sizes import ITEM_BYTES
from adapters.open_store import open_store
from adapters.store import ObjectStore
from cluster.device_memory import DeviceMemory
from cluster.secret import read_secret
from cluster.text import end_token_ids
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.disk_cache import open_cache
from node_agent.adapter_memory.eviction import POLICIES
from node_agent.base_manifests import make_manifest, send_manifest
from node_agent.collector import end
from node_agent.config import EngineConfig, EngineProcessConfig
from node_agent.engine.kv_blocks import BlockPool
from node_agent.engine.limits import Limits
from node_agent.engine_channel import WakeUp
from node_agent.engine_loop import Loop
from node_agent.engine_start import StopRequest, log_failed_start, start_process
from node_agent.ipc import Ready
from node_agent.vllm import cached_files
from node_agent.vllm.driver import Driver
from node_agent.vllm.engine import VllmDied, VllmEngine
from node_agent.vllm.figures import Figures, prometheus_logger, read_text
from node_agent.vllm.folders import FolderTier
from node_agent.vllm.measuring.idle import VllmIdleMeasurement
from node_agent.vllm.measuring.setup import Conditions, use_performance
from node_agent.vllm.own_folder import OwnFolder, keep_temporary_files_in
from node_agent.vllm.slots import AdapterOrders, Slot, SlotLimits, SlotStore
from node_agent.vllm.start import Start, dtype_of, settings_of

START_S = 900.0
"""Maximum seconds for vLLM to load a base model."""

log = logging.getLogger("garnish.engine")


class Types:
    """Constructors of vLLM's types (node_agent.vllm.engine.VllmTypes)."""

    def __init__(self) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        self._parameters, self._adapter, self._delta = SamplingParams, LoRARequest, RequestOutputKind.DELTA
        self._form = StructuredOutputsParams

    def parameters(self, arguments: dict[str, Any], bad_words: Sequence[Sequence[int]]) -> Any:
        form = arguments.get("structured_outputs")  # the check at start states none
        arguments = {**arguments, "structured_outputs": None if form is None else self._form(**form)}
        parameters = self._parameters(**arguments, output_kind=self._delta)
        if bad_words:
            parameters._bad_words_token_ids = [list(word) for word in bad_words]  # the public field takes text alone
        return parameters

    def adapter(self, digest: str, number: int, folder: Path) -> Any:
        return self._adapter(digest, number, str(folder))

    def prompt(self, token_ids: Sequence[int], salt: str) -> Any:
        return {"prompt_token_ids": list(token_ids), **({"cache_salt": salt} if salt else {})}


def known_base(process: EngineProcessConfig, registry: ObjectStore) -> BaseModel:
    """Returns the base model. If the registry has no manifest that is needed, makes one and sends it to the gateway.
    Raises ValueError or OSError."""
    config = process.engine
    try:
        return find_base(Path(config.model_dir), config.base_id, registry)
    except NoManifest:
        if not process.gateway_url:
            raise
    manifest = make_manifest(Path(config.model_dir), config.base_id)
    send_manifest(manifest, process.gateway_url, read_secret(Path(process.secret_file)))
    return base_from_manifest(manifest, config.base_id)


def kill_vllm() -> None:
    """Kills the processes that vLLM has started here. Theirs end with them."""
    for child in multiprocessing.active_children():
        child.kill()


def conditions_of(base: BaseModel, settings: Any, arguments: dict[str, Any], version: str) -> Conditions:
    """Returns what a measurement of this vLLM depends on. `settings`: as vLLM completed them. `version`: that of
    Garnish."""
    import vllm
    from vllm.platforms import current_platform

    device = "" if current_platform.is_cpu() else current_platform.get_device_name()
    return Conditions(base, dtype_of(settings), device, vllm.__version__, arguments, version)


def build_engine(config: EngineConfig, base: BaseModel, wake: WakeUp) -> tuple[VllmEngine, Ready, Conditions]:
    """Starts vLLM, and returns the engine, the first message of its connection, and what a measurement of it depends
    on. Raises ValueError or OSError on bad settings."""
    registry = open_store(config.registry)
    types, figures = Types(), Figures(read_text)
    start = Start(config, base, [figures.stat_logger, prometheus_logger()])
    driver = Driver(start, wake.set, partial(start.check, types))
    settings = settings_of(driver.wait(START_S))
    demand, policy = Demand(), POLICIES[config.eviction]
    cache = open_cache(config.disk_cache, base.fingerprint, cached_files.is_intact)
    hosts = FolderTier(registry, config.host_memory, policy(demand), wake.set, cache, base.modules.names)
    limits = SlotLimits(
        count=settings.lora_config.max_loras,
        max_rank=settings.lora_config.max_lora_rank,
        bytes=start.memory.slot,
    )

    def add(slot: Slot) -> None:
        driver.add_adapter(slot.number, types.adapter(slot.adapter.digest, slot.number, slot.folder.path))

    orders = AdapterOrders(add, lambda slot: driver.remove_adapter(slot.number))
    store = SlotStore(hosts, limits, orders, demand, policy(demand))
    blocks = BlockPool(settings.cache_config.num_gpu_blocks, settings.cache_config.block_size)
    max_context = min(settings.model_config.max_model_len, blocks.total * blocks.block_tokens)
    engine = VllmEngine(
        Limits(
            max_context=max_context,
            vocab_size=base.vocab_size,
            max_rows=settings.scheduler_config.max_num_seqs,
            max_cold=1,
            chunk_tokens=settings.scheduler_config.max_num_batched_tokens,
            queue_limit=config.queue_limit,
            prefix_cache=config.prefix_cache == "auto",
            prefetch_waste=config.prefetch_waste if config.prefetch == "auto" else None,
        ),
        store,
        blocks,
        end_token_ids(Path(config.model_dir)),
        driver,
        types,
        figures,
        config.vllm.answer_s,
    )
    ready = ready_message(engine, base, config, settings, start.memory)
    return engine, ready, conditions_of(base, settings, start.arguments, config.version)


def ready_message(
    engine: VllmEngine, base: BaseModel, config: EngineConfig, settings: Any, memory: DeviceMemory
) -> Ready:
    """Returns the first message of the engine's connection. `settings`: as vLLM completed them."""
    dtype, limits, store = dtype_of(settings), engine.limits, engine.store
    return Ready(
        base=base.fingerprint,
        device=str(settings.device_config.device_type),
        dtype=dtype,
        max_context=limits.max_context,
        kv_blocks=engine.blocks.total,
        block_tokens=engine.blocks.block_tokens,
        adapter_bytes=store.adapter_memory,
        max_rows=limits.max_rows,
        host_bytes=config.host_memory,
        largest_adapter=store.largest,
        adapter_itemsize=ITEM_BYTES[dtype],
        takes_wants=limits.prefetch_waste is not None,
        rank_limit=store.limits.max_rank,
        device_memory=memory,
    )


def set_environment(config: EngineConfig) -> None:
    """Sets the environment variables that vLLM reads."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(START_S)))  # by itself vLLM ends the start earlier
    if config.vllm.arguments.get("nnodes", 1) == 1:
        os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")  # vLLM's processes need no other host's connections
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a process with threads must not be forked


def main() -> int:
    config = start_process()
    set_up_environment()
    take_logs()
    wake = WakeUp()
    stop = StopRequest(wake)
    set_environment(config.engine)
    try:
        temporary = OwnFolder(Path(tempfile.gettempdir()))
    except OSError as error:
        log_failed_start(error)
        return 1
    keep_temporary_files_in(temporary.path)
    try:
        return _serve(config, wake, stop)
    finally:
        temporary.close()


def _serve(config: EngineProcessConfig, wake: WakeUp, stop: StopRequest) -> int:
    """Starts vLLM and serves until the node stops. Returns the exit code."""
    try:
        base = known_base(config, open_store(config.engine.registry))
        engine, ready, conditions = build_engine(config.engine, base, wake)
    except Exception as error:  # any error: the node shows it as the reason why it can't start
        log_failed_start(error)
        kill_vllm()
        return 1
    stop.listen()  # not earlier, since vLLM sets handlers while it starts
    log.info("engine is warm", extra=msgspec.to_builtins(ready))
    idle = None
    if not use_performance(engine, config.engine, conditions):
        idle = VllmIdleMeasurement(engine, config.engine, conditions)
    try:
        Loop(engine, ready, wake, lambda: stop.received, idle).run(config.socket, config.heartbeat)
    except VllmDied as error:
        log.error("vLLM has ended", extra={"reason": str(error)})
        kill_vllm()  # a process that stands still would not end by itself
        return 1
    finally:
        engine.close()
        kill_vllm()
    return 0


if __name__ == "__main__":
    end(main())  # at once: threads of vLLM may stand still
