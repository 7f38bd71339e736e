"""Never more workers than the cores that the engine leaves."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from node_agent.cores import core_share, spare_cores, usable_cores

CORES = sorted(os.sched_getaffinity(0))


@given(threads=st.integers(1, 2 * len(CORES)))
def test_spare_cores(threads: int) -> None:
    spare = spare_cores(threads)
    assert len(spare) == max(0, usable_cores() - threads)
    assert spare == CORES[len(CORES) - len(spare) :]


@given(nodes=st.integers(1, 3 * len(CORES)))
def test_nodes_of_a_host_divide_its_cores(nodes: int) -> None:
    share = core_share(nodes)
    assert share >= 1 and (share * nodes <= usable_cores() or share == 1)
    assert (share + 1) * nodes > usable_cores()


def test_a_container_quota_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert spare_cores(1, tmp_path) == [] and usable_cores(tmp_path) == 1
