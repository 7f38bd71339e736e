"""What a PCIe link carries, against the figures of the PCI Special Interest Group, and what counts as slow."""

from __future__ import annotations

import pytest

from node_agent.gpu.reading import link_bandwidth
from node_agent.gpu.watch import slow_link


@pytest.mark.parametrize(
    ("generation", "gigabytes"), [(1, 4.0), (2, 8.0), (3, 15.75), (4, 31.51), (5, 63.02), (6, 118.0), (7, 0.0)]
)
def test_sixteen_lanes_carry(generation: int, gigabytes: float) -> None:
    assert link_bandwidth(generation, 16) / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert link_bandwidth(generation, 4) == pytest.approx(link_bandwidth(generation, 16) / 4, abs=1)


@pytest.mark.parametrize(
    ("width_now", "measured", "said"),
    [
        (16, None, ""),
        (16, 25e9, ""),
        (16, 15.8e9, ""),
        (16, 15.7e9, "was measured at 15.7 GB/s; PCIe 4.0 x16 carries 31.5 GB/s"),
        (8, 25e9, "uses 8 of 16 lanes"),
        (0, 25e9, ""),
    ],
)
def test_a_slow_link_is_told(width_now: int, measured: float | None, said: str) -> None:
    told = slow_link(4, 16, width_now, measured)
    assert said in told and bool(said) == bool(told)


def test_an_unknown_link_is_not_slow() -> None:
    assert not slow_link(0, 0, 0, 1.0)
