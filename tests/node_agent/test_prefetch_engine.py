"""Prefetches beside requests in a real engine: tokens stay those of PEFT, and what came of it is reported."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.messages import Adapter
from node_agent.adapter_memory.integrity import check_memory
from node_agent.config import LinkConfig
from node_agent.engine import prefetcher
from node_agent.engine.stats import stats_of
from node_agent.engine_channel import WakeUp
from node_agent.engine_loop import Loop
from node_agent.engine_process import ready_message
from node_agent.ipc import Evict, Prefetch
from tests.node_agent.prefetch_world import want, wanted
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

STORY = [1, 403, 407, 261]


def step_until(engine: LocalEngine, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        engine.step()
        assert time.monotonic() < deadline


def call(engine: LocalEngine, adapter: Adapter) -> str:
    """Returns the tier in which a call finds its adapter."""
    request = engine.submit(STORY, 2, adapter, ignore_eos=True)
    engine.run()
    finished = engine.outcomes[request].finished
    assert finished is not None and finished.reason == "length"
    return finished.cold_start.state


@pytest.mark.parametrize(("tier", "found"), [("device", "none"), ("host", "host")])
def test_a_wanted_adapter_is_there_for_its_first_call(
    make_engine: MakeEngine, drawn_adapters: list[Path], tier: str, found: str
) -> None:
    engine = make_engine()
    adapter = engine.deploy(drawn_adapters[0])
    engine.engine.prefetcher.want(wanted(want(adapter, tier=tier)))
    step_until(engine, lambda: engine.engine.prefetcher.underway == 1)
    assert stats_of(engine.engine).prefetches == 1
    step_until(engine, lambda: engine.engine.prefetcher.underway == 0)
    assert call(engine, adapter) == found
    stats = stats_of(engine.engine)
    assert (stats.prefetches, stats.prefetch_useful_bytes) == (0, adapter.bytes)
    assert (stats.prefetch_late_bytes, stats.prefetch_wasted_bytes) == (0, 0)


def test_prefetches_can_be_switched_off(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    """And an operator's goes on all the same."""
    engine = make_engine(prefetch="off")
    adapter = engine.deploy(drawn_adapters[0])
    engine.engine.prefetcher.want(wanted(want(adapter)))
    for _ in range(5):
        engine.step()
    assert not list(engine.engine.store.hosts.all())
    assert engine.ask(Prefetch("p", adapter)).tier == "device"


def test_an_operator_evicts_what_is_wanted(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    engine = make_engine()
    adapter = engine.deploy(drawn_adapters[0])
    engine.engine.prefetcher.want(wanted(want(adapter)))
    step_until(engine, lambda: engine.engine.store.ready(adapter.digest))
    step_until(engine, lambda: engine.engine.prefetcher.underway == 0)
    assert engine.ask(Evict("e", adapter.digest)).tier == "absent"
    time.sleep(prefetcher.LOOK_INTERVAL_S)
    for _ in range(5):
        engine.step()
    assert engine.engine.prefetcher.underway == 0


def test_nothing_is_wanted_once_the_api_process_is_gone(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    engine = make_engine(store_link=LinkConfig(1e4))
    adapter = engine.deploy(drawn_adapters[0])
    engine.engine.prefetcher.want(wanted(want(adapter)))
    step_until(engine, lambda: engine.engine.prefetcher.underway == 1)
    wake = WakeUp()
    Loop(engine.engine, ready_message(engine.engine, engine.base), wake, lambda: True).drop_all()
    wake.close()
    assert engine.engine.prefetcher.underway == 0
    assert not engine.engine.store.hosts.waiting(adapter.digest)
    for _ in range(5):
        engine.step()
    assert engine.engine.prefetcher.underway == 0


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_peft_beside_prefetches(
    make_engine: MakeEngine,
    drawn_adapters: list[Path],
    reference: PeftReference,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Half of the adapters fit on the device. Wants change at drawn steps, also those of adapters that are called, over
    links that make loads last for several steps."""
    monkeypatch.setattr(prefetcher, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(prefetcher, "HYSTERESIS", 0.0)  # evicts whatever is idle
    rng = random.Random(seed)
    links = {"store_link": LinkConfig(2e7), "load_link": LinkConfig(4e7)}
    engine = make_engine(adapter_memory=512 << 10, host_memory=1 << 20, chunk_tokens=24, prefetch_waste=1.0, **links)
    cases = [Case(path, engine.deploy(path), [], 0) for path in drawn_adapters]
    running: list[tuple[Case, str]] = []
    for _ in range(10):
        chosen = rng.sample(cases, 5)
        wants = [want(case.adapter, rng.random(), tier=rng.choice(["device", "host"])) for case in chosen]  # type: ignore[arg-type]
        engine.engine.prefetcher.want(wanted(*wants, seconds=rng.choice([0.01, 60.0])))
        for _ in range(rng.randrange(8)):
            engine.step()
        kind = rng.choice(chosen + cases)
        case = Case(kind.directory, kind.adapter, [1, *(rng.randrange(3, 512) for _ in range(rng.randrange(30)))], 6)
        running.append((case, engine.submit(case.prompt, case.max_tokens, case.adapter)))
        if rng.random() < 0.3:
            engine.engine.cancel(running.pop()[1])
    engine.run()
    engine.engine.prefetcher.clear()
    tally = Tally()
    for case, request in running:
        assert not check(engine, reference, case, engine.outcomes[request].tokens, tally)
    assert tally.mismatches == 0
    step_until(engine, lambda: not engine.engine.store.hosts._fetching and not engine.engine.store.loads._entries)
    assert not list(engine.engine.store.hosts._waiters.all())
    assert check_memory(engine.engine.store) == []
