"""Handoffs pay the simulated link, both ways, and loads are slower by their results' bytes."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node_agent.adapter_memory.link import Flow, Link
from node_agent.coldstart.handoff_link import HandoffLink
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.worker import delay
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from tests.node_agent.coldstart.pools import LONG, WIDTHS, drawn_case, started


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


@pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")
def test_workers_answer_no_sooner_than_the_link_allows() -> None:
    """And with the same numbers."""
    with started(drawn_case(torch.float32), workers=1) as pool:
        x = torch.randn(8, WIDTHS[0][0])
        answers, seconds = [], []
        for link in (None, HandoffLink(Link(LinkConfig(1e4)), lambda size: None)):
            pool.link = link
            begun = time.monotonic()
            handoff = pool.open(x, [Segment(0, 8, 8)], 0, "qkv")
            assert handoff is not None and handoff.wait(LONG)
            seconds.append(time.monotonic() - begun)
            answers.append([y.clone() for y in handoff.outputs])
            handoff.close()
        results = sum(y.nbytes for y in answers[0])
        assert seconds[1] >= (x.nbytes + results) / 1e4
        assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
