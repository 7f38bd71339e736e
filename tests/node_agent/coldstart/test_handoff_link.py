"""Handoffs pay the simulated link, both ways, and loads are slower by their results' bytes. That workers wait for it is
tested in test_worker_products.py."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.adapter_memory.link import Flow, Link
from node_agent.coldstart.handoff_link import HandoffLink
from node_agent.coldstart.worker import delay
from node_agent.config import LinkConfig


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 24), st.integers(0, 4), st.sampled_from([0.0, 1e-3]))
def test_each_direction_takes_its_bytes(handed: int, answered: int, loads: int, latency: float) -> None:
    """Inputs have their direction for themselves; results share the other one with the loads that cross it."""
    clock = Clock()
    link = Link(LinkConfig(1e7, latency), clock=clock)
    for _ in range(loads):
        link.begin(Flow(), 1 << 30)
    counted: list[int] = []
    before, after = HandoffLink(link, counted.append).charge(handed, answered)
    assert counted == [answered]
    assert before == pytest.approx(1e6 * (latency + handed / 1e7), abs=1)
    assert after == pytest.approx(1e6 * (latency + (1 + loads) * answered / 1e7), abs=1)


@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=5))
def test_a_load_is_later_by_the_bytes_of_the_results(results: list[int]) -> None:
    clock, size = Clock(), 1 << 25
    link = Link(LinkConfig(1e7), clock=clock)
    load = link.begin(Flow(), size)
    for each in results:
        HandoffLink(link, lambda size: None).charge(1, each)
    clock.now += (size + sum(results)) / 1e7 - 1e-3
    assert link.active == 1 and load.crossed is None
    clock.now += 2e-3
    assert link.active == 0 and load.crossed is not None


@pytest.mark.parametrize("microseconds", [0, 50, 2_000])
def test_a_delay_takes_its_time(microseconds: int) -> None:
    begun = time.monotonic_ns()
    delay(microseconds)
    assert time.monotonic_ns() - begun >= microseconds * 1000
