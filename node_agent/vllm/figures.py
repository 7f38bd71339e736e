"""vLLM's own figures: its load for the node's reports, and its Prometheus text as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cluster.news import VllmLoad


class SchedulerStats(Protocol):
    """Part of vLLM's SchedulerStats that a node reports."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_skipped_waiting_reqs: int
    kv_cache_usage: float


class IterationStats(Protocol):
    """Part of vLLM's IterationStats that a node reports."""

    num_preempted_reqs: int


class Figures:
    """Stat logger of vLLM (StatLoggerBase): vLLM's thread records each of its steps here. Any thread may read
    `load`."""

    def __init__(self, read_text: Callable[[], bytes]) -> None:
        """`read_text` returns vLLM's metrics as Prometheus text."""
        self.read_text = read_text
        self.load = VllmLoad()

    def stat_logger(self, vllm_config: object, engine_index: int = 0) -> Figures:  # noqa: ARG002
        """Returns this object: a factory as vLLM's `stat_loggers` have them. A node has one engine core."""
        return self

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        **more: Any,  # noqa: ARG002
    ) -> None:
        load = self.load
        running, waiting, kv_usage = load.running, load.waiting, load.kv_usage
        if scheduler_stats is not None:
            running, kv_usage = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
        self.load = VllmLoad(running, waiting, round(kv_usage, 4), load.preemptions + preempted)

    def log(self) -> None:
        """Does nothing: vLLM's own lines about its load would repeat these figures."""

    def log_engine_initialized(self) -> None:
        """Does nothing: the node logs the start."""


def prometheus_logger() -> type[Any]:
    """Returns vLLM's stat logger for Prometheus, whose gauge of the adapters in use has only the last step's value.

    vLLM's own keeps one for each set of adapters that ever ran together, without end.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class LastStep(PrometheusStatLogger):  # type: ignore[misc] # mypy does not see vLLM
        def record(self, scheduler_stats: SchedulerStats | None, *rest: Any, **keywords: Any) -> None:
            if scheduler_stats is not None and self.gauge_lora_info is not None:
                self.gauge_lora_info.clear()
            super().record(scheduler_stats, *rest, **keywords)

    return LastStep


def read_text() -> bytes:
    """Returns vLLM's metrics as its HTTP server would."""
    from prometheus_client import REGISTRY, generate_latest

    return generate_latest(REGISTRY)
