"""Rows that decode while their adapter is on its way: exact, whoever computes their layers, and at nobody's cost."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.residency import evict
from node_agent.coldstart.learning import Correction
from node_agent.coldstart.messages import PassMessages
from node_agent.coldstart.pass_times import ROUNDS, CallKind, PassSample, kind_of
from node_agent.coldstart.planner import PLANS, Contention
from node_agent.cores import spare_cores
from node_agent.ipc import Finished
from node_agent.leases import InUse, Lease
from node_agent.types import Plan
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.coldstart.kept import pool_of
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally, check
from tests.support.forced import DrawnLink, force
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter
from tests.support.worker_counters import counters_of

STORY = [1, *range(50, 90)]
pytestmark = pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def directories(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of everything in every layer."""
    root = tmp_path_factory.mktemp("joining")
    return [
        make_adapter(stories_dir, root / f"r{r}", r, r=r, lora_alpha=r, target_modules=ALL_TARGETS) for r in (7, 24)
    ]


@pytest.fixture
def engine(worker_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """With one CPU worker, which computes all layers of prompts, and of decode steps wherever these can be."""
    layers, starts = worker_engine.base.num_layers, worker_engine.engine.cold_start
    plan = Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    monkeypatch.setattr(starts, "plan", lambda lease, n_tokens, ahead: plan)
    monkeypatch.setattr(
        starts, "joining", lambda waiting, others: {lease.digest for lease, _ in waiting if starts.can_step(lease)}
    )
    return worker_engine


def ended(engine: LocalEngine, request: str) -> Finished:
    finished = engine.outcomes[request].finished
    assert finished is not None
    return finished


def is_exact(engine: LocalEngine, reference: PeftReference, directory: Path | None, request: str, count: int) -> bool:
    case = Case(directory, None, STORY, count)
    return not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


def test_whole_answers_without_one_byte_on_the_device(
    engine: LocalEngine, reference: PeftReference, directories: list[Path]
) -> None:
    """Two rows of one adapter and one of another, beside a row of a third that is loaded, and one of the base."""
    there = engine.deploy(directories[0], "there")
    engine.submit(STORY, 1, there)
    engine.run()
    HeldLink(engine)
    first, second = engine.deploy(directories[1]), engine.deploy(directories[0], "again")
    assert second.digest == there.digest  # loaded, by another name
    requests = [engine.submit(STORY, 9, adapter, ignore_eos=True) for adapter in (first, first, second, None)]
    engine.run()
    for request, directory in zip(requests, [directories[1], directories[1], directories[0], None], strict=True):
        assert is_exact(engine, reference, directory, request, 9)
    cold = ended(engine, requests[0]).cold_start
    assert cold.layers_cpu == 9 * engine.base.num_layers
    assert cold.layers_device == cold.replays == 0
    assert not engine.engine.joining.cold.open


def test_all_rows_of_a_step_share_a_handoff(engine: LocalEngine, directories: list[Path]) -> None:
    """Those of one adapter, and those of others too."""
    link, adapters = HeldLink(engine), [engine.deploy(directory) for directory in directories]
    requests = [engine.submit(STORY, 40, adapters[i], ignore_eos=True) for i in (0, 0, 1)]
    engine.run(until=lambda: all(len(engine.outcomes[request].tokens) > 1 for request in requests))
    before, tokens = counters_of(pool_of(engine)).handoffs, len(engine.outcomes[requests[0]].tokens)
    engine.run(until=lambda: len(engine.outcomes[requests[0]].tokens) == tokens + 2)
    made = counters_of(pool_of(engine)).handoffs - before
    assert made == 2 * 4 * engine.base.num_layers  # a layer has four groups
    link.open()
    engine.run()
    engine.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_fails_a_step_costs_its_rows_time_and_others_nothing(
    engine: LocalEngine, reference: PeftReference, directories: list[Path], number: signal.Signals
) -> None:
    link, pool, replays = HeldLink(engine), pool_of(engine), engine.engine.cold.replays
    other = engine.submit(STORY, 30, ignore_eos=True)
    request = engine.submit(STORY, 9, engine.deploy(directories[0]), ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[request].tokens) == 3)
    pid, real = pool.pids()[0], pool.open

    def open_and_fail(*arguments: object) -> object:
        os.kill(pid, signal.SIGSTOP)  # so that it can't answer
        pool.open = real  # type: ignore[method-assign]
        handoff = real(*arguments)  # type: ignore[arg-type]
        os.kill(pid, number)
        return handoff

    pool.open = open_and_fail  # type: ignore[method-assign, assignment]
    before = len(engine.outcomes[other].tokens)
    engine.run(until=lambda: engine.engine.cold.replays == replays + 1)
    assert len(engine.outcomes[other].tokens) == before + 1
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    for _ in range(5):
        engine.step()
    assert len(engine.outcomes[request].tokens) == 3  # it waits for the weights
    link.open()
    engine.run()
    assert ended(engine, request).cold_start.replays == 1
    assert is_exact(engine, reference, directories[0], request, 9)
    assert is_exact(engine, reference, None, other, 30)
    engine.assert_clean()


def test_workers_that_are_gone_leave_rows_out_of_a_pass(
    engine: LocalEngine, reference: PeftReference, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go between the choice and the pass: it is computed for the others."""
    link = HeldLink(engine)
    other = engine.submit(STORY, 12, ignore_eos=True)
    request = engine.submit(STORY, 6, engine.deploy(directories[0]), ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[request].tokens) == 2)
    assert engine.engine.assist is not None
    monkeypatch.setattr(engine.engine.assist, "join", lambda messages, lease, layout: None)
    engine.run(until=lambda: engine.outcomes[other].finished is not None)
    assert len(engine.outcomes[request].tokens) == 2
    link.open()
    engine.run()
    assert is_exact(engine, reference, directories[0], request, 6)
    assert ended(engine, request).cold_start.replays == 0
    engine.assert_clean()


def test_a_pass_that_all_rows_are_left_out_of_holds_nothing(
    engine: LocalEngine, reference: PeftReference, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handoffs that were opened for it end: on a device with a stream each takes one of a few slots."""
    link = HeldLink(engine)
    request = engine.submit(STORY, 6, engine.deploy(directories[0]), ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[request].tokens) == 2)
    assist, opened = engine.engine.assist, list[PassMessages]()
    assert assist is not None
    open_messages = assist.messages

    def messages(at_once: bool = False) -> PassMessages | None:
        found = open_messages(at_once)
        opened.extend([found] if found is not None else [])
        return found

    monkeypatch.setattr(assist, "messages", messages)
    monkeypatch.setattr(assist, "join", lambda messages, lease, layout: None)
    for _ in range(10):
        engine.step()
    assert opened and all(each.handoffs.quiet for each in opened)
    assert len(engine.outcomes[request].tokens) == 2
    link.open()
    engine.run()
    assert is_exact(engine, reference, directories[0], request, 6)
    engine.assert_clean()


def test_an_adapter_that_decodes_on_its_way_can_t_be_evicted_and_a_client_can_leave(
    engine: LocalEngine, directories: list[Path]
) -> None:
    link, adapter = HeldLink(engine), engine.deploy(directories[0])
    request = engine.submit(STORY, 100, adapter, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[request].tokens) == 5)
    with pytest.raises(InUse):
        evict(engine.engine.store, adapter.digest)
    engine.engine.cancel(request)
    link.open()
    engine.run()
    for _ in range(100):
        engine.step()
    engine.assert_clean()
    assert check_memory(engine.engine.store) == []
    assert not any(host.holds for hosts in engine.engine.store.hosts.owned().values() for host in hosts)


@pytest.mark.parametrize("wanted", [30, pytest.param(120, marks=pytest.mark.slow)])
def test_drawn_steps_arrivals_and_faults(
    worker_engine: LocalEngine,
    reference: PeftReference,
    drawn_adapters: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    wanted: int,
) -> None:
    engine, rng, tally, seen = worker_engine, random.Random(17), Tally(), Counter[str]()
    monkeypatch.setattr(engine.engine.cold, "cold_start", engine.engine.cold_start)  # what is forced ends with the test
    forced = force(engine.engine, random.Random(18), faults=0.02)
    engine.engine.store.loader.device_link = DrawnLink(random.Random(19), rates=(50, 20, 5))  # type: ignore[assignment]
    kinds = [Case(path, engine.deploy(path), [], 0) for path in drawn_adapters]
    problems: list[str] = []
    # whether a row joins is a matter of time: a stalled host's loads end before their requests decode. All adapters
    # have room on the device, so each batch begins without them.
    while tally.cases < wanted or (not forced.joined and tally.cases < 600):
        assert forced.joined or pool_of(engine).wait_ready(60)
        for kind in kinds:
            assert kind.adapter is not None
            with suppress(InUse):  # the load of a cancelled request may go on
                evict(engine.engine.store, kind.adapter.digest)
        problems += run_batch(rng, engine, reference, kinds, tally, seen)
    assert not problems, "\n".join(problems)
    assert forced.joined


def test_rows_join_where_that_costs_little(worker_engine: LocalEngine, directories: list[Path]) -> None:
    """By the profile: workers that take long, and a load that is about to end, are not worth it."""
    engine = worker_engine
    link, starts = HeldLink(engine), engine.engine.cold_start
    request = engine.submit(STORY, 2, engine.deploy(directories[0]), ignore_eos=True)
    engine.run(until=lambda: bool(engine.engine.running) and starts.can_step(_lease(engine, request)))
    lease, profile = _lease(engine, request), starts.profile
    assert profile is not None and profile.cpu is not None

    def joins(worker_s: float, load_s: float, others: int) -> bool:
        whole = sum(starts.costs(lease, 1, profile).load)
        link = type(profile.link)(0.0, starts.link.cost.bandwidth * whole / load_s)
        layer, cpu = ((16, 1e-3),), type(profile.cpu)(worker_s, 0.0, 0.0)
        starts.use(type(profile)(profile.key, layer, cpu, link), starts.workers)
        return bool(starts.joining([(lease, 1)], others))

    assert joins(worker_s=1e-6, load_s=1.0, others=3)
    assert not joins(worker_s=1e-6 + 1e-3, load_s=1.0, others=3)  # four groups a layer: several times as long
    assert joins(worker_s=1e-6 + 1e-3, load_s=1.0, others=0)  # and nobody but the row would mind
    assert not joins(worker_s=4e-4, load_s=1e-6, others=0)
    starts.use(profile, starts.workers)
    link.open()
    engine.run()


def test_a_prompt_asks_slow_workers_where_it_is_alone(worker_engine: LocalEngine, directories: list[Path]) -> None:
    """A layer on them takes twice a layer on the device; a load takes four of these. Beside others whose adapters load
    as well the pipeline is better for all, and beside others that decode that the prompt waits."""
    engine = worker_engine
    link, starts = HeldLink(engine), engine.engine.cold_start
    request = engine.submit(STORY, 9, engine.deploy(directories[0]), ignore_eos=True)
    engine.run(until=lambda: bool(engine.engine.running) and starts.can_step(_lease(engine, request)))
    lease, profile = _lease(engine, request), starts.profile
    assert profile is not None and profile.cpu is not None
    whole, layers = sum(starts.costs(lease, 1, profile).load), engine.base.num_layers
    passes = exact_passes(kind_of(starts.store.layout(lease), 40))
    cpu = type(profile.cpu)(5e-4, 0.0, 0.0)
    slow = type(profile.link)(0.0, starts.link.cost.bandwidth * whole / (4e-3 * layers))
    starts.use(type(profile)(profile.key, ((64, 1e-3),), cpu, slow, passes=passes), starts.workers)
    starts.row_cpu = Correction()  # what was learnt until now is of another host
    beside = [
        Contention(other_requests=others, ready=ready, decodes=8) for others, ready in ((0, 0), (20, 0), (20, 20))
    ]
    assert [starts.plan(lease, 40, each).name for each in beside] == ["assist", "pipeline", "wait"]
    starts.use(profile, starts.workers)
    link.open()
    engine.run()


def exact_passes(kind: CallKind) -> tuple[PassSample, ...]:
    """Passes that took as long as the profile says."""
    return tuple(PassSample(kind, plan, 0.1, 0.1) for plan in PLANS for _ in range(ROUNDS))


def _lease(engine: LocalEngine, request: str) -> Lease:
    lease = engine.engine.running[request].lease
    assert lease is not None
    return lease
