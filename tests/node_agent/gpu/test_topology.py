"""Which cores a GPU's node gets, over a /sys of our own, against a rule that counts each core's owners."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.gpu.devices import Gpu
from node_agent.gpu.numa import near_cores, parse_cpulist, share_cores
from tests.node_agent.gpu.fake_sys import gpu, make_sys


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set()), ("0-0", {0})]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert parse_cpulist(text) == cores


def test_gpus_of_two_numa_nodes_get_cores_of_their_own(tmp_path: Path) -> None:
    sys = make_sys(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, {0: 0, 1: 0, 2: 1, 3: 1})
    shares = share_cores([gpu(n) for n in range(4)], range(16), 16, sys)
    assert shares == {"GPU-0": {0, 1, 2, 3}, "GPU-1": {8, 9, 10, 11}, "GPU-2": {4, 5, 6, 7}, "GPU-3": {12, 13, 14, 15}}
    assert {len(cores) for cores in share_cores([gpu(n) for n in range(4)], range(16), 2, sys).values()} == {2}


@pytest.mark.parametrize("broken", ["-1", "two", "7"], ids=["one NUMA node", "no number", "no such node"])
def test_where_the_host_does_not_say_all_cores_count(tmp_path: Path, broken: str) -> None:
    sys = make_sys(tmp_path, {0: "0-3"}, {0: 0})
    (sys / "bus/pci/devices" / gpu(0).bus / "numa_node").write_text(broken)
    assert near_cores(gpu(0), range(8), sys) == set(range(8))
    assert near_cores(gpu(1), range(8), sys) == set(range(8)), "it is not in /sys"
    assert near_cores(Gpu(index=0, uuid="GPU-0"), range(8), sys) == set(range(8)), "its address is unknown"


def test_cores_that_this_process_may_not_use_are_left_out(tmp_path: Path) -> None:
    sys = make_sys(tmp_path, {0: "0-3", 1: "4-7"}, {0: 0, 1: 1})
    assert near_cores(gpu(0), {2, 3, 4}, sys) == {2, 3}
    assert near_cores(gpu(1), {2, 3}, sys) == {2, 3}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 12), st.integers(1, 40))
def test_shares_are_fair_and_apart(
    tmp_path_factory: pytest.TempPathFactory, nodes: list[int], size: int, most: int
) -> None:
    """`nodes`: of each GPU its NUMA node, which has `size` cores."""
    lists = {node: f"{node * size}-{(node + 1) * size - 1}" for node in range(3)}
    sys = make_sys(tmp_path_factory.mktemp("sys"), lists, dict(enumerate(nodes)))
    shares = share_cores([gpu(n) for n in range(len(nodes))], range(3 * size), most, sys)
    for number, node in enumerate(nodes):
        own, beside = shares[f"GPU-{number}"], nodes.count(node)
        assert own <= set(range(node * size, (node + 1) * size))
        assert len(own) == (min(size // beside, most) if beside <= size else size)
        if beside <= size:
            assert all(not own & shares[f"GPU-{other}"] for other in range(len(nodes)) if other != number)
