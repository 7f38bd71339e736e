"""Best effort delays calls that somebody waits for by no more than the pass under way: their prompts go first, passes
are short for the next one, and adapter memory is theirs."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from node_agent.engine import promises
from node_agent.engine.admission import STARVED_AFTER
from node_agent.engine.promises import MIN_BESIDE_FLOOD, UNKNOWN_SHARE
from node_agent.engine.reserves import AWAITED_SECONDS
from node_agent.performance.drift import Drift
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.test_chunks_within_promises import MODEL
from tests.node_agent.test_floods import watch
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

STORY = [1, 403, 407, 261]
LONG = [1, *range(60, 160)]
CALLS = 30
"""Of each other adapter, within which a request of best effort is to have its turn."""


def batch(engine: LocalEngine, count: int, tokens: list[int] = LONG, length: int = 40, **owner: object) -> list[str]:
    """The caller's own: nothing else tells its calls from these."""
    return [
        engine.submit(tokens, length, tenant="own", slo_class="best_effort", ignore_eos=True, **owner)
        for _ in range(count)
    ]


def call(engine: LocalEngine, length: int = 3, **owner: object) -> str:
    return engine.submit(STORY, length, tenant="own", ignore_eos=True, **owner)


def test_a_prompt_goes_before_a_batchs(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass of its own, whether the batch's prompts are computed or its rows decode; and the batch goes on."""
    engine = make_engine(max_rows=16)
    jobs = batch(engine, 6)
    for tokens in (0, 2):
        engine.run(until=lambda tokens=tokens: len(engine.outcomes[jobs[0]].tokens) >= tokens)
        own, passes = call(engine), watch(engine, monkeypatch)
        engine.step()
        assert engine.outcomes[own].tokens
        assert [row.request.id for row in passes[0][0]] == [own]
        assert {row.request.id for row in passes[1][0]} & set(jobs)
        monkeypatch.undo()
    engine.end()


@pytest.mark.parametrize("modelled", [False, True])
def test_a_batchs_passes_are_short_while_others_call(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, modelled: bool
) -> None:
    """And whole chunks as long as nobody else has called for a while."""
    engine = make_engine(max_rows=16, chunk_tokens=256, prefix_cache="off")
    if modelled:
        engine.engine.drift = Drift(MODEL)
        monkeypatch.setattr(engine.engine.drift, "observe", lambda *_: None)
    passes = watch(engine, monkeypatch)

    def longest_of(count: int) -> int:
        passes.clear()
        jobs = batch(engine, count, length=2)
        engine.run(until=lambda: all(engine.outcomes[job].finished for job in jobs))
        return max(sum(row.length for row in rows[n_decode:]) for rows, n_decode in passes)

    assert longest_of(6) > 200
    own = call(engine, 1)
    engine.run(until=lambda: engine.outcomes[own].finished is not None)
    step = MODEL.decode.seconds(16, 16 * 110, 0) / MODEL.prefill.per_token if modelled else 256 // UNKNOWN_SHARE
    assert longest_of(6) <= max(step, 256 // MIN_BESIDE_FLOOD)
    engine.engine.scheduler.callers._awaited_at = time.monotonic() - AWAITED_SECONDS
    assert longest_of(6) > 200


def test_a_call_takes_the_adapter_memory_of_best_effort(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """It begins at once; the batch's call goes on unharmed when its adapter is there again."""
    engine = make_engine(max_rows=4, adapter_slots=1)
    path, other = drawn_adapters[:2]
    theirs, wanted = engine.deploy(path), engine.deploy(other)
    (job,) = batch(engine, 1, STORY, adapter=theirs)
    engine.run(until=lambda: len(engine.outcomes[job].tokens) > 4)
    own = call(engine, 5, adapter=wanted)
    engine.run(until=lambda: bool(engine.outcomes[own].admitted))
    assert engine.outcomes[job].finished is None
    engine.run()
    finished = engine.outcomes[job].finished
    assert finished is not None and finished.preemptions == 1
    for request, adapter, where, tokens in ((job, theirs, path, 40), (own, wanted, other, 5)):
        case = Case(where, adapter, STORY, tokens)
        assert not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


def test_best_effort_does_not_preempt_best_effort(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    engine = make_engine(max_rows=4, adapter_slots=1)
    first, second = (engine.deploy(path) for path in drawn_adapters[:2])
    jobs = [*batch(engine, 1, STORY, adapter=first), *batch(engine, 1, STORY, adapter=second)]
    engine.run()
    ends = [engine.outcomes[job].finished for job in jobs]
    assert [end.preemptions for end in ends if end is not None] == [0, 0]


@pytest.mark.parametrize("slo_class", ["best_effort", "standard"])
def test_who_starves_for_adapter_memory_keeps_out_best_effort_alone(
    make_engine: MakeEngine, drawn_adapters: list[Path], slo_class: str
) -> None:
    """But one that somebody waits for keeps out all, as always."""
    engine = make_engine(max_rows=4, adapter_slots=1)
    used, waited_for = (engine.deploy(path) for path in drawn_adapters[:2])
    holds = call(engine, 200, adapter=used)
    engine.run(until=lambda: bool(engine.outcomes[holds].tokens))
    starved = engine.submit(STORY, 2, waited_for, tenant="own", slo_class=slo_class, ignore_eos=True)
    for _ in range(200):  # until its file is there, and only room is wanted
        engine.step()
        if waiting := [r for r in engine.engine.queue if r.short_since]:
            waiting[0].short_since = time.monotonic() - STARVED_AFTER
            break
    assert waiting, "it never came to wait for room"
    own, job = call(engine, 2, adapter=used), batch(engine, 1, STORY, adapter=used)[0]
    for _ in range(5):
        engine.step()
    admitted = [bool(engine.outcomes[request].admitted) for request in (starved, own, job)]
    assert admitted == [False, slo_class == "best_effort", False]
    engine.end()


def test_best_effort_does_not_evict_what_others_call(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    """Their next call finds its adapter; once they have not called for a while its room is best effort's."""
    engine = make_engine(max_rows=4, adapter_slots=2)
    wanted, *theirs = (engine.deploy(path) for path in drawn_adapters[:3])
    own = call(engine, 2, adapter=wanted)
    engine.run()
    jobs = [batch(engine, 1, STORY, adapter=adapter, length=20)[0] for adapter in theirs]
    engine.run()
    own = call(engine, 2, adapter=wanted)
    engine.run()
    assert engine.outcomes[own].admitted == "none"
    ends = [engine.outcomes[job].finished for job in jobs]
    assert [(end.reason, end.preemptions) for end in ends if end is not None] == [("length", 0)] * 2
    callers = engine.engine.scheduler.callers
    callers._adapters = {digest: at - AWAITED_SECONDS for digest, at in callers._adapters.items()}
    for adapter in theirs:
        batch(engine, 1, STORY, adapter=adapter, length=2)
    engine.run()
    assert not engine.engine.store.on_device(wanted.digest)


@pytest.fixture(scope="module")
def largest(
    stories_dir: Path, load_stories: LoadModel, drawn_adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> int:
    """Bytes on the device of the largest of the first three adapters."""
    sizes = {"dtype": "float32", "threads": 1, "kv_memory": 1 << 20, "adapter_memory": 8 << 20, "host_memory": 8 << 20}
    made = LocalEngine(stories_dir, tmp_path_factory.mktemp("registry"), load=load_stories, **sizes)
    with closing(made) as engine:
        for path in drawn_adapters[:3]:
            batch(engine, 1, STORY, adapter=engine.deploy(path), length=1)
        engine.run()
        return max(resident.bytes for resident in engine.engine.store.residents())


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("times", [1.0, 1.4, 2.0, 3.0])
def test_what_others_call_all_the_time_keeps_no_best_effort_out_for_ever(
    make_engine: MakeEngine, drawn_adapters: list[Path], largest: int, times: float, slots: int
) -> None:
    """However large its adapter is, and however little memory there is beside it."""
    engine = make_engine(max_rows=4, adapter_slots=slots, adapter_memory=int(times * largest))
    adapters = [engine.deploy(path) for path in drawn_adapters[:3]]
    for theirs in adapters:
        (job,) = batch(engine, 1, STORY, adapter=theirs, length=2)
        for _ in range(CALLS):
            if engine.outcomes[job].finished is not None:
                break
            for adapter in adapters:
                if adapter is not theirs:
                    own = call(engine, 1, adapter=adapter)
                    engine.run(until=lambda own=own: engine.outcomes[own].finished is not None)
        assert engine.outcomes[job].finished is not None, theirs.digest


def test_best_effort_that_waited_long_evicts_what_others_call(
    make_engine: MakeEngine, drawn_adapters: list[Path]
) -> None:
    """One that others use all the time leaves it only the room of one that they call now and then."""
    engine = make_engine(max_rows=4, adapter_slots=2)
    used, called, theirs = (engine.deploy(path) for path in drawn_adapters[:3])
    holds, own = call(engine, 300, adapter=used), call(engine, 1, adapter=called)
    engine.run(until=lambda: engine.outcomes[own].finished is not None)
    (job,) = batch(engine, 1, STORY, adapter=theirs, length=1)
    for _ in range(200):
        engine.step()
        if waiting := [request for request in engine.engine.queue if request.short_since]:
            break
    assert waiting and engine.engine.store.on_device(called.digest)
    waiting[0].short_since = time.monotonic() - AWAITED_SECONDS
    engine.run(until=lambda: engine.outcomes[job].finished is not None)
    assert engine.outcomes[holds].finished is None
    engine.end()


def test_cold_passes_of_a_batch_are_short_while_others_call(
    make_engine: MakeEngine, drawn_adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And others' cold passes are not, and go first."""
    engine, budgets = make_engine(max_rows=8, chunk_tokens=256), list[tuple[int, bool]]()
    advance = engine.engine.cold.advance

    def watched(tokens: int) -> int:
        waited_for = any(request.slo_class != "best_effort" for request in engine.engine.cold.requests)
        budgets.append((tokens, not waited_for))
        return advance(tokens)

    monkeypatch.setattr(engine.engine.cold, "advance", watched)
    theirs, wanted = (engine.deploy(path) for path in drawn_adapters[:2])
    alone = batch(engine, 1, adapter=theirs, length=2)[0]
    engine.run(until=lambda: engine.outcomes[alone].finished is not None)
    assert {tokens for tokens, _ in budgets} == {256}
    own = call(engine, 2, adapter=wanted)
    engine.run(until=lambda: engine.outcomes[own].finished is not None)
    budgets.clear()
    monkeypatch.setattr(promises, "UNKNOWN_SHARE", 256)
    batch(engine, 2, adapter=theirs, length=2)
    engine.run()  # a layer at a time, where the budget is less than one
    assert {tokens for tokens, best_effort in budgets if best_effort} == {1}
    assert {tokens for tokens, best_effort in budgets if not best_effort} <= {256}
