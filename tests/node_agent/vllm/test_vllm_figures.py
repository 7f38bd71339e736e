"""vLLM's own figures, as its stat loggers get them."""

from __future__ import annotations

from types import SimpleNamespace

from cluster.news import VllmLoad
from node_agent.vllm.figures import Figures


def scheduler(running: int, waiting: int, skipped: int, usage: float) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, num_skipped_waiting_reqs=skipped, kv_cache_usage=usage
    )


def test_the_load_is_that_of_the_last_step_and_preemptions_add_up() -> None:
    made = Figures(bytes)
    figures = made.stat_logger(object(), 0)
    assert figures.load == VllmLoad(0, 0, 0.0, 0)
    figures.record(scheduler(2, 1, 3, 0.123456), SimpleNamespace(num_preempted_reqs=1), mm_cache_stats=None)
    assert made.load == VllmLoad(2, 4, 0.1235, 1)
    figures.record(None, SimpleNamespace(num_preempted_reqs=2), engine_idx=0)
    assert made.load == VllmLoad(2, 4, 0.1235, 3)
    figures.record(scheduler(0, 0, 0, 0.0), None)
    assert made.load == VllmLoad(0, 0, 0.0, 3)
