"""Cores and devices as the process really has them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from node_agent.cores import usable_cores
from node_agent.device import free_memory, pick_device
from node_agent.device_event import ENDED, EndedEvent
from node_agent.engine.kv_blocks import BlockPool


def test_cores_without_a_quota_are_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("50000 100000", 1), ("150000 100000", 2)])
def test_cgroup_v2_quota(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    available = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (available if cores is None else min(cores, available))


def test_cgroup_v1_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("100000")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_affinity_is_respected() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="unknown; use auto, cpu or cuda"):
        pick_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no CUDA device"):
            pick_device("cuda")
    assert free_memory(torch.device("cpu")) > 0


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(5, 16)
    taken = pool.allocate(4)
    assert taken is not None
    assert sorted(taken) == [1, 2, 3, 4]
    assert pool.allocate(1) is None
    pool.release(taken[:2])
    assert pool.free == 2
    with pytest.raises(RuntimeError, match="twice"):
        pool.release([*taken[2:], 4])
    assert pool.blocks_for(0) == 0
    assert pool.blocks_for(17) == 2
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1, 16)


class Ends(EndedEvent):
    """When it is told to."""

    ended = False

    def query(self) -> bool:
        return self.ended


def test_blocks_that_something_still_writes_are_not_handed_out() -> None:
    pool, first, second = BlockPool(4, 16), Ends(), Ends()
    taken = pool.allocate(3)
    assert taken is not None
    pool.release(taken[:1], [ENDED])
    assert pool.free == 1
    pool.release(taken[1:], [first, second])
    first.ended = True
    pool.poll()
    assert (pool.free, pool.allocate(2)) == (1, None)
    second.ended = True
    assert pool.free == 1, "nobody has looked"
    pool.poll()
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
