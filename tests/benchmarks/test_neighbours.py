"""What the study of neighbours compares: busy processes that end with it, and ratios of its rounds."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.engine.neighbours import busy_processes, figures_of
from node_agent.cores import usable_cores


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_one_busy_process_per_core_and_none_afterwards() -> None:
    before = children()
    with busy_processes():
        busy = children() - before
        assert len(busy) == usable_cores()
    assert not children() & busy
    assert all(not Path(f"/proc/{pid}").exists() or os.getpid() == pid for pid in busy)


def test_figures_are_of_the_rounds_own_ratios() -> None:
    def row(index: int, alone: float, busy: float) -> dict[str, float]:
        return {"round": index, "default_alone_ms": 10.0, "default_busy_ms": 200.0, "limited_alone_ms": alone,
                "limited_busy_ms": busy}  # fmt: skip

    found = figures_of([row(0, 10.0, 20.0), row(1, 20.0, 30.0), row(2, 11.0, 44.0)])
    assert (found["busy_over_alone"], found["busy_over_alone_max"]) == (2.0, 4.0)
    assert (found["alone_over_default"], found["alone_over_default_max"]) == (1.1, 2.0)
    assert found["default_busy_over_alone"] == 20.0
    assert "round" not in found
