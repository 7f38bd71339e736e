"""Strict requests: places are kept for them, and best-effort ones give up theirs and are computed again unharmed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.messages import Adapter, Sampling
from node_agent.engine.preemption import MAX_PREEMPTIONS
from node_agent.engine.stats import stats_of
from node_agent.ipc import Finished
from tests.node_agent.test_engine import Gate
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import GREEDY, LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

STORY = [1, 403, 407, 261]
BLOCK_BYTES = 2 * 5 * 4 * 8 * 4 * 4
"""Of 4 tokens of stories260K in fp32."""
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=7, frequency_penalty=0.5)


def ended(engine: LocalEngine, request: str) -> Finished:
    finished = engine.outcomes[request].finished
    assert finished is not None
    return finished


def flood(engine: LocalEngine, count: int, length: int = 60, **owner: str) -> list[str]:
    return [
        engine.submit(STORY, length, tenant="cheap", slo_class="best_effort", ignore_eos=True, **owner)
        for _ in range(count)
    ]


def strict(engine: LocalEngine, length: int = 3) -> str:
    return engine.submit(STORY, length, tenant="dear", slo_class="strict", ttft=0.5, ignore_eos=True)


def test_strict_enters_at_once_under_a_best_effort_flood(make_engine: MakeEngine) -> None:
    """Each in the iteration in which it came, whether rows are kept for it already or must be given up."""
    engine = make_engine(max_rows=4)
    best_effort = flood(engine, 20)
    engine.run(until=lambda: len(engine.engine.running) == 4)
    calls = [strict(engine) for _ in range(3)]
    engine.step()
    assert all(engine.outcomes[call].admitted for call in calls)
    engine.run(until=lambda: all(engine.outcomes[call].finished for call in calls))
    for _ in range(20):
        engine.step()
    assert len(engine.engine.running) == 3, "one row is kept for the next"
    engine.run()
    assert all(ended(engine, r).reason == "length" and len(engine.outcomes[r].tokens) == 60 for r in best_effort)
    assert 3 <= sum(ended(engine, r).preemptions for r in best_effort) <= 3 + 3


def test_strict_takes_kv_blocks_of_best_effort(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=8, block_tokens=4, kv_memory=BLOCK_BYTES * 41)  # 40 blocks
    best_effort = flood(engine, 4, 44)  # 12 blocks each: three run
    engine.run(until=lambda: len(engine.engine.running) == 3)
    call = strict(engine, 60)  # 16 blocks
    engine.step()
    assert engine.outcomes[call].admitted
    assert engine.engine.blocks.free >= 0
    engine.run()
    assert all(len(engine.outcomes[r].tokens) == 44 for r in best_effort)


def test_nobody_is_preempted_in_vain(make_engine: MakeEngine) -> None:
    """Not for a strict request that would not fit all the same, nor for others, nor are others' than best effort."""
    engine = make_engine(max_rows=4, block_tokens=4, kv_memory=BLOCK_BYTES * 41)
    standard = engine.submit(STORY, 96, tenant="other", ignore_eos=True)  # 25 blocks
    best_effort = flood(engine, 1, 40)  # 11 blocks
    engine.run(until=lambda: len(engine.engine.running) == 2)
    too_large, late = strict(engine, 80), engine.submit(STORY, 40, tenant="other", ignore_eos=True)
    engine.step()
    assert not engine.outcomes[too_large].admitted
    assert not engine.outcomes[late].admitted
    assert len(engine.engine.running) == 2
    engine.run()
    assert [ended(engine, r).preemptions for r in (standard, *best_effort, too_large, late)] == [0] * 4


@pytest.mark.parametrize("ways", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
def test_a_preempted_answer_is_the_same(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference, ways: Sampling, adapted: bool
) -> None:
    """Preempted while its prompt is computed and in the midst of its answer: no token is lost, repeated or changed."""
    engine = make_engine(max_rows=2, chunk_tokens=8)
    path = drawn_adapters[0]
    adapter: Adapter | None = engine.deploy(path) if adapted else None
    prompt = [1, *range(60, 90)]
    alone = engine.submit(prompt, 30, adapter, ways, ignore_eos=True)
    engine.run()
    request = engine.submit(prompt, 30, adapter, ways, ignore_eos=True, tenant="cheap", slo_class="best_effort")
    filler = flood(engine, 1, 200)
    for tokens in (0, 4, 15):
        engine.run(until=lambda tokens=tokens: len(engine.outcomes[request].tokens) >= tokens)
        calls = [strict(engine) for _ in range(2)]
        engine.run(until=lambda calls=calls: all(engine.outcomes[call].finished for call in calls))
    engine.engine.cancel(filler[0])
    engine.run()
    assert ended(engine, request).preemptions >= 2
    assert engine.outcomes[request].tokens == engine.outcomes[alone].tokens
    if ways is GREEDY:
        case = Case(path if adapted else None, adapter, prompt, 30)
        assert not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


def test_a_request_is_preempted_so_often_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=1)
    (request,) = flood(engine, 1, 100)
    engine.run(until=lambda: bool(engine.engine.running))
    for _ in range(MAX_PREEMPTIONS):
        call = strict(engine)
        engine.step()
        assert engine.outcomes[call].admitted
        engine.run(until=lambda call=call: engine.outcomes[call].finished is not None)
        engine.run(until=lambda: bool(engine.engine.running))
    last = strict(engine)
    engine.step()
    assert not engine.outcomes[last].admitted
    engine.run()
    assert ended(engine, request).preemptions == MAX_PREEMPTIONS
    assert len(engine.outcomes[request].tokens) == 100


def test_preempted_requests_can_be_cancelled_and_expire(make_engine: MakeEngine) -> None:
    """While they wait again; a text so far is kept, and everything is given back."""
    engine = make_engine(max_rows=2)
    gone = flood(engine, 1, 100)[0]
    late = engine.submit(STORY, 100, tenant="cheap", slo_class="best_effort", ignore_eos=True)
    engine.run(until=lambda: all(len(engine.outcomes[r].tokens) > 2 for r in (gone, late)))
    calls = [strict(engine, 200) for _ in range(2)]
    engine.step()
    assert all(engine.outcomes[call].admitted for call in calls)
    assert {r.id for r in engine.engine.queue} == {gone, late}
    engine.engine.cancel(gone)
    found = next(iter(engine.engine.queue))
    found.deadline = time.monotonic()
    engine.run()
    assert (ended(engine, gone).reason, ended(engine, late).reason) == ("cancelled", "timeout")
    assert engine.outcomes[late].tokens


def test_a_preempted_request_waits_for_its_adapter_again(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """Its adapter is evicted meanwhile: it comes back, and the answer is PEFT's."""
    engine = make_engine(max_rows=1)
    path = drawn_adapters[0]
    adapter = engine.deploy(path)
    request = engine.submit(STORY, 20, adapter, ignore_eos=True, tenant="cheap", slo_class="best_effort")
    engine.run(until=lambda: len(engine.outcomes[request].tokens) > 4)
    call = strict(engine, 10)
    engine.step()
    assert engine.outcomes[call].admitted
    engine.engine.store.room.evict(adapter.digest)
    engine.run()
    assert ended(engine, request).preemptions == 1
    assert not check(engine, reference, Case(path, adapter, STORY, 20), engine.outcomes[request].tokens, Tally())


def test_standard_is_not_kept_out_by_strict(make_engine: MakeEngine) -> None:
    """Strict requests without end take what is kept for them; behind a waiting standard one they take no more."""
    engine = make_engine(max_rows=4)
    calls = [strict(engine, 12) for _ in range(4)]
    engine.run(until=lambda: len(engine.engine.running) == 4)
    waiting = engine.submit(STORY, 6, tenant="other", ignore_eos=True)

    def keep_calling() -> bool:
        if sum(r.slo_class == "strict" for r in engine.engine.queue) < 2:
            calls.append(strict(engine, 12))
        return engine.outcomes[waiting].finished is not None

    engine.run(until=keep_calling)
    assert len(calls) < 30
    engine.run()


def test_no_best_effort_enters_while_strict_waits(make_engine: MakeEngine) -> None:
    """Whoever came first: it would have to give its place up at once."""
    engine = make_engine(max_rows=2)
    running = [engine.submit(STORY, length, tenant="other", ignore_eos=True) for length in (6, 60)]
    engine.run(until=lambda: len(engine.engine.running) == 2)
    (earlier,) = flood(engine, 1, 4)
    call = engine.submit(STORY, 4, tenant="dear", slo_class="strict", ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[call].admitted))
    assert not engine.outcomes[earlier].admitted
    assert engine.outcomes[running[0]].finished is not None
    engine.run()
    assert ended(engine, earlier).preemptions == 0


def test_strict_takes_the_adapter_memory_of_best_effort(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """Of an adapter that nobody else uses; who gave it up goes on unharmed when it is there again."""
    engine = make_engine(max_rows=4, adapter_slots=1)
    path, other = drawn_adapters[:2]
    cheap, dear = engine.deploy(path), engine.deploy(other)
    both = [
        engine.submit(STORY, 150, cheap, ignore_eos=True, tenant="cheap", slo_class="best_effort") for _ in range(2)
    ]
    engine.run(until=lambda: all(len(engine.outcomes[r].tokens) > 4 for r in both))
    call = engine.submit(STORY, 5, dear, ignore_eos=True, tenant="dear", slo_class="strict")
    engine.run(until=lambda: bool(engine.outcomes[call].admitted))
    assert not any(engine.outcomes[r].finished for r in both)
    engine.run()
    assert [ended(engine, r).preemptions for r in (*both, call)] == [1, 1, 0]
    for request, adapter, where, tokens in ((both[0], cheap, path, 150), (call, dear, other, 5)):
        assert not check(
            engine, reference, Case(where, adapter, STORY, tokens), engine.outcomes[request].tokens, Tally()
        )


def test_adapter_memory_that_others_use_is_not_given_up_in_vain(
    make_engine: MakeEngine, drawn_adapters: list[Path]
) -> None:
    engine = make_engine(max_rows=4, adapter_slots=1)
    shared, dear = engine.deploy(drawn_adapters[0]), engine.deploy(drawn_adapters[1])
    cheap = engine.submit(STORY, 60, shared, ignore_eos=True, tenant="cheap", slo_class="best_effort")
    standard = engine.submit(STORY, 20, shared, ignore_eos=True, tenant="other")
    engine.run(until=lambda: all(engine.outcomes[r].tokens for r in (cheap, standard)))
    call = engine.submit(STORY, 5, dear, ignore_eos=True, tenant="dear", slo_class="strict")
    engine.run(until=lambda: engine.outcomes[standard].finished is not None)
    assert not engine.outcomes[call].admitted
    # its prompt came a step behind the other's
    assert len(engine.outcomes[cheap].tokens) >= 19, "it was left alone as long as that was in vain"
    engine.run()
    assert [ended(engine, r).preemptions for r in (cheap, standard, call)] == [1, 0, 0]
    assert len(engine.outcomes[cheap].tokens) == 60


@pytest.mark.parametrize("arrives", ["while it waits for a row", "after that"])
def test_waits_for_an_adapter_are_told_of_one_that_was_preempted_meanwhile(
    make_engine: MakeEngine, drawn_adapters: list[Path], arrives: str
) -> None:
    """Those before it gave up its place, and no wait for a row. What has come of the load is kept."""
    engine = make_engine(max_rows=1, cold_start="wait")
    adapter, store = engine.deploy(drawn_adapters[0]), engine.engine.store
    engine.submit(STORY, 2, adapter)
    engine.run()  # it is in host memory
    assert store.discard(adapter.digest)
    gate = Gate(engine)
    begun = time.monotonic()
    cheap = engine.submit(STORY, 5, adapter, ignore_eos=True, tenant="cheap", slo_class="best_effort")
    engine.run(until=lambda: cheap in engine.engine.running and engine.engine.running[cheap].awaits_adapter)
    time.sleep(0.05)
    call = strict(engine, 100)
    engine.step()
    assert engine.outcomes[call].admitted
    if arrives == "while it waits for a row":
        gate.open()
        time.sleep(0.2)
    else:
        engine.run(until=lambda: engine.outcomes[call].finished is not None)
        gate.open()
    engine.run()
    took, finished = time.monotonic() - begun, ended(engine, cheap)
    assert finished.preemptions == 1
    assert 0.05 <= finished.cold_start.exposed <= finished.cold_start.load
    if arrives == "while it waits for a row":
        assert finished.cold_start.exposed <= took - 0.2, "in which it waited for a row"


@pytest.mark.parametrize(("standard", "waits"), [(0, False), (3, False), (3, True), (8, True)])
def test_what_strict_requests_would_find_is_what_they_find(make_engine: MakeEngine, standard: int, waits: bool) -> None:
    """So many of them enter at once, and no more; where a standard request waits it may be one more."""
    engine = make_engine(max_rows=8)
    first = [engine.submit(STORY, 100, tenant="other", ignore_eos=True) for _ in range(standard)]
    engine.run(until=lambda: len(engine.engine.running) == standard)
    best_effort = flood(engine, 12, 100)
    engine.run(until=lambda: len(engine.engine.running) >= 7)  # a row may be kept for a light tenant
    if waits:
        first.append(engine.submit(STORY, 100, tenant="other", ignore_eos=True))
    giving = sum(r.slo_class == "best_effort" for r in engine.engine.running.values())
    room = stats_of(engine.engine).strict
    assert room is not None
    assert (room.rows, room.prompt_tokens) == (giving if waits else 8 - standard, 0)
    calls = [strict(engine) for _ in range(9)]
    engine.engine.prepare()
    engine.book()
    admitted = sum(bool(engine.outcomes[call].admitted) for call in calls)
    assert room.rows <= admitted <= room.rows + waits
    room = stats_of(engine.engine).strict
    assert room is not None and room.rows == 0
    assert room.prompt_tokens == len(STORY) * admitted
    for request in (*first, *best_effort, *calls):
        engine.engine.cancel(request)
    engine.run()


def test_kv_blocks_that_strict_requests_would_find(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=8, block_tokens=4, kv_memory=BLOCK_BYTES * 41)  # 40 blocks
    engine.submit(STORY, 44, tenant="other", ignore_eos=True)  # 12 blocks
    flood(engine, 4, 44)
    engine.run(until=lambda: len(engine.engine.running) == 2)
    room = stats_of(engine.engine).strict
    assert room is not None and room.blocks == 40 - 12
    call = strict(engine, 28 * 4 - len(STORY))
    engine.step()
    assert engine.outcomes[call].admitted
    engine.run()


def test_a_full_queue_of_best_effort_is_not_full_for_strict(make_engine: MakeEngine) -> None:
    """Be it the same tenant's: its batch jobs must not keep its own chat out."""
    engine = make_engine(max_rows=1, queue_limit=3)
    running = engine.submit(STORY, 4, tenant="own", ignore_eos=True)
    engine.run(until=lambda: len(engine.engine.running) == 1)
    jobs = [engine.submit(STORY, 4, tenant="own", slo_class="best_effort", ignore_eos=True) for _ in range(3)]
    standard = engine.submit(STORY, 4, tenant="own", ignore_eos=True)
    call = engine.submit(STORY, 4, tenant="own", slo_class="strict", ignore_eos=True)
    engine.book()
    assert ended(engine, standard).error_type == "overloaded"
    assert ended(engine, jobs[-1]).error_type == "overloaded", "the newest"
    engine.run()
    assert all(ended(engine, request).reason == "length" for request in (running, call, *jobs[:-1]))
