"""What is told of a cold start is what happened: delays that are known must be found in it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from cluster.messages import Adapter
from node_agent.cores import spare_cores
from node_agent.ipc import Finished
from node_agent.types import Plan
from tests.node_agent.coldstart.held_link import HeldLink
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, make_adapter

PROMPT = [1, *range(50, 90)]
DELAY = 0.3
"""Seconds. Only lower bounds are asserted, and what can't be more than a whole that has it."""
MOST_OF_IT = 0.9 * DELAY
"""What is counted begins when the engine first looks."""
needs_core = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def directory(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("phases") / "whole"
    return make_adapter(stories_dir, out, 3, r=7, lora_alpha=7, target_modules=ALL_TARGETS)


@pytest.fixture
def assisted(worker_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """All layers of every cold chunk are computed by the worker."""
    layers = worker_engine.base.num_layers
    plan = Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    monkeypatch.setattr(worker_engine.engine.cold_start, "plan", lambda lease, n_tokens, ahead: plan)
    return worker_engine


def step_for(engine: LocalEngine, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        engine.step()


def ended(engine: LocalEngine, request: str) -> Finished:
    finished = engine.outcomes[request].finished
    assert finished is not None
    return finished


def delay_header(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next load, and with it all of a small adapter."""
    store = engine.engine.store.loader.store
    real = store.get_range

    def late(key: str, start: int, length: int) -> bytes:
        time.sleep(DELAY)
        return real(key, start, length)

    monkeypatch.setattr(store, "get_range", late)


@pytest.mark.parametrize("way", ["wait", "pipeline"])
def test_bytes_that_are_awaited_before_the_admission_are_no_queue(
    make_engine: MakeEngine, directory: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an adapter needs of memory stands in its header: until that is read, the store is what is waited for."""
    engine = make_engine(cpu_workers=0, cold_start=way)
    adapter = engine.deploy(directory)
    delay_header(engine, monkeypatch)
    request = engine.submit(PROMPT, 2, adapter, ignore_eos=True)
    engine.run()
    finished, cold = ended(engine, request), ended(engine, request).cold_start
    assert cold.state == "absent"
    assert min(cold.load, cold.fetch, cold.exposed) > MOST_OF_IT
    assert finished.queue < finished.prefill and cold.exposed <= finished.prefill
    assert cold.plan == "wait" or cold.forecast > MOST_OF_IT  # the plan was made after it


def test_what_a_request_waits_for_others_is_queue_and_not_exposed(make_engine: MakeEngine, directory: Path) -> None:
    """The only row is taken until long after the adapter has come."""
    engine = make_engine(cpu_workers=0, max_rows=1)
    adapter = engine.deploy(directory)
    other = engine.submit(PROMPT, 20, ignore_eos=True)
    engine.step()
    request = engine.submit(PROMPT, 2, adapter, ignore_eos=True)
    end = time.monotonic() + DELAY
    while time.monotonic() < end:
        engine.engine.prepare()  # the other one computes nothing
    engine.run()
    assert engine.outcomes[other].finished is not None
    finished = ended(engine, request)
    assert finished.queue >= DELAY
    assert finished.cold_start.exposed <= finished.prefill


@needs_core
def test_a_chunk_that_is_computed_again_waited_for_its_weights(assisted: LocalEngine, directory: Path) -> None:
    engine, replays = assisted, assisted.engine.cold.replays
    link, engine_assist = HeldLink(engine), engine.engine.assist
    assert engine_assist is not None
    pool = engine_assist.workers
    real, worker = pool.open, pool.pids()[0]

    def open_and_kill(*arguments: object) -> object:
        os.kill(worker, signal.SIGSTOP)  # so that it can't answer before
        handoff = real(*arguments)  # type: ignore[arg-type]
        os.kill(worker, signal.SIGKILL)
        pool.open = real  # type: ignore[method-assign]
        return handoff

    pool.open = open_and_kill  # type: ignore[method-assign, assignment]
    request = engine.submit(PROMPT, 2, engine.deploy(directory), ignore_eos=True)
    engine.run(until=lambda: engine.engine.cold.replays == replays + 1)
    step_for(engine, DELAY)
    link.open()
    engine.run()
    finished = ended(engine, request)
    assert finished.cold_start.replays == 1
    assert MOST_OF_IT < finished.cold_start.exposed <= finished.prefill


@needs_core
@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_a_request_that_ends_while_its_second_token_waits(
    assisted: LocalEngine, directory: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = assisted
    monkeypatch.setattr(engine.engine.cold_start, "joining", lambda waiting, others: set())
    link = HeldLink(engine)
    adapter = engine.deploy(directory)
    request = engine.submit(PROMPT, 4, adapter, ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[request].tokens))
    step_for(engine, DELAY)
    if how == "cancelled":
        engine.engine.cancel(request)
    else:
        engine.engine.running[request].deadline = time.monotonic()
    engine.run()
    link.open()
    finished = ended(engine, request)
    assert (finished.reason, len(engine.outcomes[request].tokens)) == (how, 1)
    assert finished.cold_start.exposed > MOST_OF_IT
    assert finished.cold_start.load == 0  # it had not ended


def test_a_load_that_ended_with_the_answer_is_told(make_engine: MakeEngine, directory: Path) -> None:
    """One token, whose pass ends just when the last layer is there."""
    engine = make_engine(cpu_workers=0, cold_start="pipeline")
    adapter: Adapter = engine.deploy(directory)
    engine.engine.cold_start.plan = lambda lease, n_tokens, ahead: Plan("pipeline")  # type: ignore[method-assign]
    store, real = engine.engine.store, engine.engine._book

    def book_later(*arguments: object) -> None:
        while not store.ready(adapter.digest):
            store.poll()
            time.sleep(0.001)
        real(*arguments)  # type: ignore[arg-type]

    engine.engine.cold._book = book_later
    request = engine.submit(PROMPT, 1, adapter, ignore_eos=True)
    engine.run()
    cold = ended(engine, request).cold_start
    assert cold.plan == "pipeline" and cold.load >= cold.fetch > 0
