"""Records drawn-up steps in vLLM's stat loggers, without an engine: `python -m tests.vllm.stat_loggers BASE OUT`.

It runs in the environment that has vLLM. It writes the node's load to OUT, as JSON, and then vLLM's metrics.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from node_agent.vllm.figures import Figures, prometheus_logger, read_text

STEPS = 50


def main() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.metrics.loggers import StatLoggerManager
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    config = AsyncEngineArgs(model=sys.argv[1], enable_lora=True, max_lora_rank=8).create_engine_config()
    figures = Figures(read_text)
    manager = StatLoggerManager(config, [0], custom_stat_loggers=[figures.stat_logger, prometheus_logger()])
    manager.log_engine_initialized()
    for at in range(STEPS):
        iteration = IterationStats()
        iteration.num_preempted_reqs = 2
        step = SchedulerStats(num_running_reqs=at, num_waiting_reqs=1, num_skipped_waiting_reqs=2, kv_cache_usage=0.5)
        step.running_lora_adapters[f"adapter-{at}"] = 1
        manager.record(step, iteration, engine_idx=0)
        manager.record(None, None)
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(figures.load) + b"\n" + figures.read_text())


if __name__ == "__main__":
    main()
