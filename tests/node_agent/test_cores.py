"""Never more workers than the cores that the engine leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from node_agent.cores import CoreTimes, core_share, core_times, others_share, spare_cores, usable_cores

CORES = sorted(os.sched_getaffinity(0))


@given(threads=st.integers(1, 2 * len(CORES)))
def test_spare_cores(threads: int) -> None:
    spare = spare_cores(threads)
    assert len(spare) == max(0, usable_cores() - threads)
    assert spare == CORES[threads:][: len(spare)]
    assert spare_cores(threads, order=CORES[::-1]) == CORES[::-1][threads:][: len(spare)]


@given(nodes=st.integers(1, 3 * len(CORES)))
def test_nodes_of_a_host_divide_its_cores(nodes: int) -> None:
    share = core_share(nodes)
    assert share >= 1 and (share * nodes <= usable_cores() or share == 1)
    assert (share + 1) * nodes > usable_cores()


def test_a_container_quota_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert spare_cores(1, tmp_path) == [] and usable_cores(tmp_path) == 1


def test_what_others_use_is_all_but_ones_own() -> None:
    before = CoreTimes(passed=100.0, used=60.0, this_process=10.0)
    assert others_share(before, CoreTimes(102.0, 61.5, 11.5)) == 0.0
    assert others_share(before, CoreTimes(102.0, 61.5, 10.5)) == 0.5
    assert others_share(before, before) == 0.0


def test_core_times_are_of_the_usable_cores(tmp_path: Path) -> None:
    hertz, core = os.sysconf("SC_CLK_TCK"), CORES[0]
    lines = ["cpu  9 9 9 9 9 9 9 9 0 0", f"cpu{core} 1 2 3 1000 1000 4 5 6 7 0", "cpu99999 50 50 50 50 50 50 50 50 0 0"]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 5 0 9", "ctxt 7"]))
    assert core_times(tmp_path / "stat").used == (1 + 2 + 3 + 4 + 5 + 6) / hertz


def test_a_process_that_computes_beside_this_one_is_seen() -> None:
    before = core_times()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        time.sleep(0.4)
        after = core_times()
        other.kill()
    assert others_share(before, after) > 0.3 / len(CORES)
