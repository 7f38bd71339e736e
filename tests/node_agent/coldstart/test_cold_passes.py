"""Prompts that are computed while their adapter is on its way: exact, whoever computes, whatever arrives when."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from node_agent.coldstart.cold_starts import ColdStartMode
from node_agent.coldstart.learning import LearntLink, Outcome
from node_agent.coldstart.pass_times import kind_of
from node_agent.coldstart.planner import Contention
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from node_agent.ipc import Generated
from node_agent.leases import LayerState, Lease, LoadFailed
from node_agent.types import Plan
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.coldstart.kept import pool_of
from tests.node_agent.coldstart.pools import counted, eventually
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally, check
from tests.support.forced import force
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter
from tests.support.worker_counters import counters_of

STORY = [1, *range(50, 90)]
needs_core = pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def adapter_dir(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapts everything, in every layer."""
    out = tmp_path_factory.mktemp("whole") / "whole"
    return make_adapter(stories_dir, out, 3, r=7, lora_alpha=7, target_modules=ALL_TARGETS)


@pytest.fixture
def assisted(worker_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """An engine with one CPU worker, which computes all layers of prompts, and none of decode steps."""
    layers, starts = worker_engine.base.num_layers, worker_engine.engine.cold_start
    plan = Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    monkeypatch.setattr(starts, "plan", lambda lease, n_tokens, ahead: plan)
    monkeypatch.setattr(starts, "joining", lambda waiting, others: set())
    return worker_engine


def exact(
    engine: LocalEngine,
    reference: PeftReference,
    directory: Path,
    request: str,
    count: int,
    prompt: list[int] = STORY,
) -> bool:
    case = Case(directory, None, prompt, count)
    return not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


@needs_core
def test_a_prompt_is_computed_without_one_byte_on_the_device(
    assisted: LocalEngine, reference: PeftReference, adapter_dir: Path
) -> None:
    """Its first token comes from the workers alone; the second waits for the weights, and others decode meanwhile."""
    link, before = HeldLink(assisted), counters_of(pool_of(assisted))
    request = assisted.submit(STORY, 6, assisted.deploy(adapter_dir), ignore_eos=True)
    assisted.run(until=lambda: bool(assisted.outcomes[request].tokens))
    other = assisted.submit(STORY, 8, ignore_eos=True)
    assisted.run(until=lambda: assisted.outcomes[other].finished is not None)
    assert len(assisted.outcomes[request].tokens) == 1
    link.open()
    assisted.run()
    finished = assisted.outcomes[request].finished
    assert finished is not None
    cold = finished.cold_start
    assert (cold.plan, cold.layers_cpu, cold.layers_device, cold.replays) == ("assist", assisted.base.num_layers, 0, 0)
    assert exact(assisted, reference, adapter_dir, request, 6)
    assisted.assert_clean()
    assert counted(pool_of(assisted), before).timeouts == 0


@needs_core
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_fails_costs_time_and_no_token(
    assisted: LocalEngine,
    reference: PeftReference,
    adapter_dir: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chunk is computed again when the weights are there, and the worker comes back."""
    link = HeldLink(assisted)
    pool, failed = pool_of(assisted), []
    real, before, replays = pool.open, counters_of(pool), assisted.engine.cold.replays

    def open_and_fail(*arguments: object) -> object:
        if not failed:
            failed.append(pool.pids()[0])
            os.kill(failed[0], signal.SIGSTOP)  # so that it can't answer
        handoff = real(*arguments)  # type: ignore[arg-type]
        if len(failed) == 1:
            failed.append(0)
            os.kill(failed[0], number)
        return handoff

    monkeypatch.setattr(pool, "open", open_and_fail)
    request = assisted.submit(STORY, 6, assisted.deploy(adapter_dir), ignore_eos=True)
    assisted.run(until=lambda: assisted.engine.cold.replays == replays + 1)
    assert not assisted.outcomes[request].tokens
    if number == signal.SIGSTOP:
        os.kill(failed[0], signal.SIGCONT)
    link.open()
    assisted.run()
    finished = assisted.outcomes[request].finished
    assert finished is not None and finished.cold_start.replays == 1
    assert exact(assisted, reference, adapter_dir, request, 6)
    assert pool.wait_ready(60, 1) == 1
    again = assisted.submit([*STORY, 5], 3, ignore_eos=True)
    assisted.run()
    assert assisted.outcomes[again].finished is not None
    counters = counted(pool, before)
    assert counters.timeouts == (1 if number == signal.SIGSTOP else 0)
    assert counters.deaths == (1 if number == signal.SIGKILL else 0)


@needs_core
def test_an_assist_plan_without_workers_loads_layer_by_layer(
    assisted: LocalEngine, reference: PeftReference, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end between the plan and the pass's beginning: nothing is computed in vain."""
    pool, plan = pool_of(assisted), assisted.engine.cold_start.plan

    def planned(lease: Lease, n_tokens: int, contention: Contention) -> Plan:
        found = plan(lease, n_tokens, contention)
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: pool.usable == 0)
        return found

    monkeypatch.setattr(assisted.engine.cold_start, "plan", planned)
    request = assisted.submit(STORY, 4, assisted.deploy(adapter_dir), ignore_eos=True)
    assisted.run()
    finished = assisted.outcomes[request].finished
    assert finished is not None
    cold = finished.cold_start
    assert (cold.plan, cold.replays, cold.layers_cpu) == ("pipeline", 0, 0)
    assert exact(assisted, reference, adapter_dir, request, 4)


@needs_core
def test_a_client_that_leaves_during_a_handed_over_pass(
    assisted: LocalEngine, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pass ends, and what its workers read is given back."""
    link = HeldLink(assisted)
    layers = assisted.base.num_layers
    half = Plan("assist", layers // 2, 0.0, (1.0,) * layers, (0.0,) * layers)  # the later ones wait for the link
    monkeypatch.setattr(assisted.engine.cold_start, "plan", lambda lease, n_tokens, ahead: half)
    request = assisted.submit(STORY * 9, 6, assisted.deploy(adapter_dir))
    assisted.run(until=lambda: any(cold.run.layer > 0 for cold in assisted.engine.cold.open))
    assisted.engine.cancel(request)
    link.open()
    assisted.run()
    for _ in range(100):
        assisted.step()
    assisted.assert_clean()
    assert not any(host.holds for hosts in assisted.engine.store.hosts.owned().values() for host in hosts)


@needs_core
@pytest.mark.parametrize("wanted", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_drawn_plans_arrivals_and_faults(
    worker_engine: LocalEngine,
    reference: PeftReference,
    drawn_adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    wanted: int,
) -> None:
    engine, rng, tally, seen = worker_engine, random.Random(7), Tally(), Counter[str]()
    monkeypatch.setattr(engine.engine.cold, "cold_start", engine.engine.cold_start)  # what is forced ends with the test
    forced = force(engine.engine, random.Random(8), faults=0.1)
    kinds = [Case(None, None, [], 0), *(Case(path, engine.deploy(path), [], 0) for path in drawn_adapters)]
    problems: list[str] = []
    while tally.cases < wanted or not (all(forced.plans.values()) and seen["layers_cpu"] and seen["layers_device"]):
        problems += run_batch(rng, engine, reference, kinds, tally, seen)
        assert tally.cases < 1000, f"plans {forced.plans}; of the layers, workers and the device computed {seen}"
    assert not problems, "\n".join(problems)


def wait_for_host(engine: LocalEngine, count: int) -> None:
    """Until so many adapters are wholly in host memory; nothing is computed."""
    deadline = time.monotonic() + 30
    while len(list(engine.engine.store.hosts.complete())) < count:
        engine.engine.prepare()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.engine.prepare()


@needs_core
def test_a_first_token_waits_for_no_decode_step(assisted: LocalEngine, adapter_dir: Path) -> None:
    """It is there before the hot pass of its iteration, for no layer had to be waited for."""
    link, engine = HeldLink(assisted), assisted.engine
    other = assisted.submit(STORY, 20, ignore_eos=True)
    assisted.run(until=lambda: len(assisted.outcomes[other].tokens) > 1)
    request = assisted.submit(STORY, 2, assisted.deploy(adapter_dir), ignore_eos=True)
    wait_for_host(assisted, 1)
    engine.take_events()
    used = engine.compute_cold()
    assert [(type(e), e.id) for e in engine.take_events()] == [(Generated, request)]
    assert used == len(STORY)
    assert list(engine.compute_hot(used))
    assert [(type(e), e.id) for e in engine.take_events()] == [(Generated, other)]
    link.open()
    assisted.run()
    assisted.assert_clean()


@needs_core
def test_cold_passes_hold_others_up_no_longer_than_a_warm_chunk(assisted: LocalEngine, adapter_dir: Path) -> None:
    link, engine, adapter = HeldLink(assisted), assisted.engine, assisted.deploy(adapter_dir)
    prompt, most, layers = STORY * 9, engine.limits.chunk_tokens, assisted.base.num_layers
    first, second = (assisted.submit([i, *prompt[1:]], 2, adapter, ignore_eos=True) for i in (1, 2))
    wait_for_host(assisted, 1)
    engine.take_events()
    used = engine.compute_cold()
    assert len(prompt) < used <= most < 2 * len(prompt)
    assert [e.id for e in engine.take_events()] == [first]
    assert [(cold.row.request.id, cold.run.layer) for cold in engine.cold.open] == [
        (second, (most - len(prompt)) * layers // len(prompt))
    ]
    engine.compute_cold()
    assert [e.id for e in engine.take_events()] == [second]
    link.open()
    assisted.run()
    assisted.assert_clean()


@needs_core
def test_passes_and_loads_that_ended_correct_later_forecasts(
    worker_engine: LocalEngine, adapter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a host of any speed: the plan is not chosen by what was measured, and no correction fades during the test."""
    engine = worker_engine
    starts, link = engine.engine.cold_start, HeldLink(engine)
    assert starts.profile is not None
    monkeypatch.setattr(starts, "mode", ColdStartMode(("pipeline",)))
    monkeypatch.setattr(starts, "link", LearntLink(starts.profile.link, lambda: 0.0))
    request = engine.submit(STORY, 2, engine.deploy(adapter_dir), ignore_eos=True)
    engine.run(until=lambda: bool(engine.engine.running))
    lease, profile = engine.engine.running[request].lease, starts.profile
    assert lease is not None and profile is not None
    before = starts.costs(lease, len(STORY), profile)
    kind = kind_of(starts.store.layout(lease), len(STORY))
    slow = Outcome(
        "r0", "pipeline", len(STORY), 0.1, 1.0, 0.0, 0.0, waited=0.0, computed=0.5, layers_cpu=0, layers_device=5
    )
    for _ in range(5):
        starts.observe(lease, replace(slow, by_profile=0.25))
        starts.learn_load(1 << 24, 4 * (1 << 24) / profile.link.bandwidth)
    assert starts.times.bounds(kind, "pipeline", np.array([0.25]))[1][0] == pytest.approx(1.0)
    starts.observe(lease, slow)
    assert len(starts.times.of(kind, "pipeline")) == 5, (
        "a pass that shared the engine says nothing of one that is alone"
    )
    after = starts.costs(lease, len(STORY), profile)
    assert (after.load > 1.5 * before.load).all()
    link.open()
    engine.run()
    outcome = starts.outcomes[-1]
    assert (outcome.request, outcome.tokens) == (request, len(STORY))
    assert outcome.layers_cpu + outcome.layers_device == engine.base.num_layers
    assert outcome.forecast > 0 and 0 <= outcome.exposed + outcome.waited <= outcome.seconds


@pytest.mark.parametrize("bandwidth", [1e6, 1e7])
@pytest.mark.parametrize("tokens", [5, len(STORY)])
def test_a_pipelined_prompt(
    make_engine: MakeEngine, reference: PeftReference, adapter_dir: Path, bandwidth: float, tokens: int
) -> None:
    """Layer by layer behind a simulated link; the engine's own choice of when."""
    engine = make_engine(cold_start="pipeline", cpu_workers=0, load_link=LinkConfig(bandwidth))
    prompt = STORY[:tokens]
    request = engine.submit(prompt, 6, engine.deploy(adapter_dir), ignore_eos=True)
    engine.run()
    finished = engine.outcomes[request].finished
    assert finished is not None
    assert finished.cold_start.layers_cpu == 0
    if finished.cold_start.plan == "pipeline":
        assert finished.cold_start.layers_device == engine.base.num_layers
    assert exact(engine, reference, adapter_dir, request, 6, prompt)
    engine.assert_clean()


def test_a_load_that_fails_in_the_midst_of_a_pass_fails_its_request_alone(
    make_engine: MakeEngine, adapter_dir: Path
) -> None:
    """The pass has begun a layer that is there when a later one turns out to be damaged."""
    engine = make_engine(cold_start="pipeline", cpu_workers=0, load_link=LinkConfig(1e6))
    engine.engine.cold_start.plan = lambda lease, n_tokens, ahead: Plan("pipeline")  # type: ignore[method-assign]
    store, failed = engine.engine.store, []
    real = store.state

    def state_and_fail(lease: Lease, layer: int) -> int:
        found = real(lease, layer)
        if found == LayerState.DEVICE and not failed:
            failed.append(layer)
        elif failed == [0] and layer == 0:  # the pass asks: it has begun
            store.device[lease.digest].copy.failure = LoadFailed("layer 3 is not what was written")
            failed.append(3)
        return found

    store.state = state_and_fail  # type: ignore[method-assign]
    request = engine.submit(STORY, 4, engine.deploy(adapter_dir))
    other = engine.submit(STORY, 4, ignore_eos=True)
    engine.run()
    assert failed == [0, 3]
    finished = engine.outcomes[request].finished
    assert finished is not None and finished.error_type == "unavailable"
    assert not engine.outcomes[request].tokens
    assert len(engine.outcomes[other].tokens) == 4


@needs_core
def test_no_layer_of_a_failed_load_is_begun(assisted: LocalEngine, adapter_dir: Path) -> None:
    """Not even by the workers, though its rows may lie in host memory."""
    link = HeldLink(assisted)
    request = assisted.submit(STORY, 4, assisted.deploy(adapter_dir))
    assisted.run(until=lambda: bool(assisted.engine.running))
    lease = assisted.engine.running[request].lease
    assert lease is not None
    starts, copy = assisted.engine.cold_start, assisted.engine.store.device[lease.digest].copy
    plan = starts.plan(lease, len(STORY), Contention())
    copy.failure = LoadFailed("layer 0 is not what was written")
    assert starts.ready_until(lease, plan, 0) == 0
    link.open()
    assisted.run()
    finished = assisted.outcomes[request].finished
    assert finished is not None and finished.error_type == "unavailable"
