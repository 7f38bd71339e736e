"""Books against what vLLM's workers report, and the bound on their silence."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from node_agent.vllm import watch
from node_agent.vllm.watch import Watch
from node_agent.vllm.worker_extension import WorkerAdapters
from tests.node_agent.vllm.folder_world import SlotWorld, put_adapter

ANSWER_S = 3.0


class PlayedDriver:
    def __init__(self) -> None:
        self.last_sign, self.asked = 0.0, 0

    def request_reports(self) -> None:
        self.asked += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that Watch sees."""
    now = [time.monotonic()]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SlotWorld]:
    made = SlotWorld(tmp_path)
    with closing(made.store):
        yield made


def pass_time(found: Watch, clock: list[float], seconds: float, step: float = 0.25) -> str:
    """Polls every `step` seconds. Returns the first complaint."""
    until = clock[0] + seconds
    while clock[0] < until:
        clock[0] += step
        if reason := found.poll():
            return reason
    return ""


def test_silence_is_bounded_while_an_answer_is_due(world: SlotWorld, clock: list[float]) -> None:
    driver = PlayedDriver()
    found = Watch(driver, world.store, ANSWER_S)  # type: ignore[arg-type]
    assert not pass_time(found, clock, watch.CHECK_S - 1) and not driver.asked
    began = clock[0]
    assert "has not answered for 3 s" in pass_time(found, clock, 60)
    assert driver.asked == 1 and clock[0] - began < ANSWER_S + 3


def test_tokens_are_signs_of_life(world: SlotWorld, clock: list[float]) -> None:
    driver = PlayedDriver()
    found = Watch(driver, world.store, ANSWER_S)  # type: ignore[arg-type]
    for _ in range(20):
        driver.last_sign = clock[0]
        assert not pass_time(found, clock, 2)


def test_a_pause_of_this_process_is_no_silence(world: SlotWorld, clock: list[float]) -> None:
    found = Watch(PlayedDriver(), world.store, ANSWER_S)  # type: ignore[arg-type]
    assert not pass_time(found, clock, watch.CHECK_S + 1)
    clock[0] += 3600
    assert not found.poll()


def test_answers_end_the_wait_and_the_next_question_comes(world: SlotWorld, clock: list[float]) -> None:
    driver = PlayedDriver()
    found = Watch(driver, world.store, ANSWER_S)  # type: ignore[arg-type]
    for number in range(1, 4):
        assert not pass_time(found, clock, watch.CHECK_S + 1)
        assert driver.asked == number
        found.compare([WorkerAdapters(slots=[], host=[])])


def test_differences_are_told_and_agreement_is_not(
    world: SlotWorld, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = (put_adapter(world.objects, at) for at in range(2))
    found = Watch(PlayedDriver(), world.store, ANSWER_S)  # type: ignore[arg-type]
    for adapter in (good, bad):
        world.acquire(adapter)
    pass_time(found, clock, watch.CHECK_S + 1)
    world.vllm.end_load(world.store)
    world.vllm.end_load(world.store, "it has a bias")  # after the question, before the answer
    with caplog.at_level(logging.ERROR):
        found.compare([WorkerAdapters(slots=[1], host=[1])] * 2)
        assert not caplog.records
        pass_time(found, clock, watch.CHECK_S + 1)
        found.compare([WorkerAdapters(slots=[1], host=[1]), WorkerAdapters(slots=[1], host=[1, 7])])
    (record,) = caplog.records
    assert record.__dict__["rank"] == 1 and record.__dict__["host"] == [1, 7] and record.__dict__["expected"] == [1]
