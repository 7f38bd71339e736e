"""Cores pass from the engine to its workers, as many as there are workers in use, and back."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from node_agent.coldstart import engine_cores
from node_agent.coldstart.engine_cores import EngineCores
from tests.node_agent.coldstart.pools import crowded, drawn_case

CORES = 4
"""Cores that the host seems to have."""


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(engine_cores, "usable_cores", lambda: CORES)
    before, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(CORES)
    yield CORES
    torch.set_num_threads(before)
    os.sched_setaffinity(0, affinity)


def test_workers_beyond_the_limit_sleep_and_the_engine_keeps_their_cores(threads: int) -> None:
    """Else a node that chose one of many workers would compute each assisted pass with one thread."""
    with crowded(drawn_case(torch.float32), 3) as pool:
        pool.disarm()
        pool.engine_cores = EngineCores(threads, range(3))
        for limit, left in ((3, 1), (1, 3), (2, 2)):
            pool.limit = limit
            assert pool.engine_cores.slowdown == threads / left
            pool.arm()
            assert torch.get_num_threads() == left and pool._polling == set(range(limit))
            pool.disarm()
            assert torch.get_num_threads() == threads and not pool._polling


def test_a_limit_that_changes_while_workers_are_armed_leaves_no_thread_behind(threads: int) -> None:
    """On a GPU they are armed until the device has sent all signals."""
    cores = EngineCores(threads, range(1))
    cores.lend()
    assert torch.get_num_threads() == threads - 1
    cores.leave(())
    cores.take_back()
    assert torch.get_num_threads() == threads
