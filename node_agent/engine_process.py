"""The engine process: owns the device, and exchanges node_agent.ipc messages with the API process over one Unix
socket."""

from __future__ import annotations

import logging

import msgspec

from node_agent.collector import end, settle, stop_collecting

if __name__ == "__main__":
    stop_collecting()  # before the imports below load torch

from transformers.utils.logging import disable_progress_bar

from adapters.base_model import BaseModel
from cluster.logs import CAPACITY
from node_agent.device import flush_denormals
from node_agent.engine.loop import Engine
from node_agent.engine.setup import build_engine
from node_agent.engine_channel import WakeUp
from node_agent.engine_loop import Loop
from node_agent.engine_start import StopRequest, log_failed_start, start_process
from node_agent.ipc import Ready
from node_agent.performance.capacity import capacity_of
from node_agent.performance.idle import IdleMeasurement
from node_agent.performance.setup import use_performance

log = logging.getLogger("garnish.engine")


def ready_message(engine: Engine, base: BaseModel) -> Ready:
    """Returns the first message of an engine's connection."""
    ready = Ready(
        base=base.fingerprint,
        device=str(engine.runner.device),
        dtype=str(engine.runner.dtype).removeprefix("torch."),
        max_context=engine.limits.max_context,
        kv_blocks=engine.blocks.total,
        block_tokens=engine.runner.block_tokens,
        adapter_bytes=engine.store.pool.size,
        max_rows=engine.limits.max_rows,
        host_bytes=engine.store.hosts.memory,
        largest_adapter=engine.store.largest,
        adapter_itemsize=engine.runner.dtype.itemsize,
        takes_wants=engine.limits.prefetch_waste is not None,
    )
    return engine.ready_now(ready)


def main() -> int:
    config = start_process()
    disable_progress_bar()  # standard error is for JSON lines only
    flush_denormals()
    wake = WakeUp()
    stop = StopRequest(wake)
    stop.listen()
    try:
        engine, base = build_engine(config.engine, wake.set)
        has_model = use_performance(engine, config.engine, base)
    except Exception as error:  # any error: the node shows it as the reason why it can't start
        log_failed_start(error)
        return 1
    ready = ready_message(engine, base)
    log.info("engine is warm", extra=msgspec.to_builtins(ready))
    log.info(CAPACITY, extra=msgspec.to_builtins(capacity_of(engine, base)))
    settle()
    idle = None if has_model else IdleMeasurement(engine, config.engine, base)
    loop = Loop(engine, ready, wake, lambda: stop.received, idle)
    loop.run(config.socket, config.heartbeat)
    engine.close()
    wake.close()
    return 0


if __name__ == "__main__":
    end(main())
