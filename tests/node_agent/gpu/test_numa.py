"""On which NUMA node workers and memory are, over a /sys of our own, and where the kernel says that memory is."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest

from node_agent.gpu import numa
from node_agent.gpu.devices import list_gpus
from node_agent.gpu.numa import home_node, memory_near, nearest_first
from tests.node_agent.gpu.conftest import MakeNvml
from tests.node_agent.gpu.fake_sys import make_sys

FOUR = {0: "0-3", 1: "4-7", 2: "8-11", 3: ""}
DISTANCES = {0: "10 21 16 30", 1: "21 10 30 16", 2: "16 30 10 21"}


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Three NUMA nodes with four cores each, and one of memory alone. GPU-0 is on node 2."""
    return make_sys(tmp_path, FOUR, {0: 2}, DISTANCES)


def test_a_gpus_node_and_else_that_of_the_first_core(make_nvml: MakeNvml, four: Path) -> None:
    make_nvml().set("nvmlDeviceGetCount_v2", value=1)
    bus = next(iter((four / "bus/pci/devices").iterdir()))
    bus.rename(bus.with_name(list_gpus()[0].bus))
    assert home_node("GPU-0", range(12), four) == 2
    assert home_node("GPU-9", range(5, 12), four) == 1, "no such GPU"
    assert home_node("", range(12), four) == 0
    assert home_node("", {77}, four) is None
    assert home_node("", range(12), four / "nothing") is None


def test_cores_by_their_distance(four: Path) -> None:
    """As the firmware has it; where it says nothing, those of the node before all others."""
    assert nearest_first(range(12), 2, four) == [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    assert nearest_first({1, 6, 9}, 1, four) == [6, 1, 9]
    assert nearest_first(range(12), 3, four) == list(range(12)), "a node without cores, nor distances"
    for node in range(3):
        (four / f"devices/system/node/node{node}/distance").write_text("10 21\n")
    assert nearest_first(range(12), 1, four) == [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11]
    for silent in (None, 7):
        assert nearest_first([3, 1, 2], silent, four) == [1, 2, 3]
    assert nearest_first([3, 1, 2], 0, four / "nothing") == [1, 2, 3]


def test_without_libnuma_memory_is_touched_from_a_near_core(four: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "LIBRARY", "libnuma-is-not-here.so")
    before = os.sched_getaffinity(0)
    mine = min(before)
    cores = four / "devices/system/node/node2/cpulist"
    for text, node, expected in ((f"{mine}", 2, {mine}), ("", 2, before), (f"{mine}", None, before)):
        cores.write_text(text)
        with memory_near(node, before, four):
            assert os.sched_getaffinity(0) == expected
        assert os.sched_getaffinity(0) == before
    cores.write_text(f"{mine}")
    with pytest.raises(ZeroDivisionError), memory_near(2, before, four):
        _ = 1 // 0
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("library", [numa.LIBRARY, "libnuma-is-not-here.so"])
def test_where_the_kernel_put_it(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory as the handoff's, on the first NUMA node of this host."""
    monkeypatch.setattr(numa, "LIBRARY", library)
    node, pages = home_node("", os.sched_getaffinity(0)), 64
    if node is None or not Path("/proc/self/numa_maps").exists():
        pytest.skip("NOT RUN: this host does not say where memory is")
    fd = os.memfd_create("garnish-numa-test")
    with memory_near(node, os.sched_getaffinity(0)):
        os.posix_fallocate(fd, 0, pages * mmap.PAGESIZE)
    with mmap.mmap(fd, pages * mmap.PAGESIZE) as memory:
        assert not any(memory[:: mmap.PAGESIZE])
        (line,) = (
            line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "garnish-numa-test" in line
        )
    os.close(fd)
    assert dict(re.findall(r"N(\d+)=(\d+)", line)) == {str(node): str(pages)}
