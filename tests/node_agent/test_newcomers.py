"""Prompts of tenants that ask for little go before a flood's batch: at once, for a bounded time, and unharmed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.exact import Case, Tally, check
from benchmarks.local_engine import LocalEngine, MakeEngine
from benchmarks.peft_reference import PeftReference
from node_agent.engine.batch import Row
from node_agent.engine.newcomers import MOST_PASSES

STORY = [1, 403, 407, 261]
VICTIMS = ("v0", "v1", "v2")


def flooded(engine: LocalEngine, length: int = 200, **owner: str) -> list[str]:
    """A batch full of one tenant's requests, which decode, but for what is kept for VICTIMS, and more that wait."""
    for victim in VICTIMS:
        engine.submit(STORY, 1, tenant=victim)
    engine.run()
    flood = [engine.submit(STORY, length, tenant="flood", ignore_eos=True, **owner) for _ in range(40)]
    engine.run(until=lambda: len(engine.outcomes[flood[0]].tokens) > 3)
    return flood


def end(engine: LocalEngine) -> None:
    for request in [*engine.engine.queue, *engine.engine.running.values()]:
        engine.engine.cancel(request.id)
    engine.run()
    engine.assert_clean()


def begin(engine: LocalEngine) -> None:
    """An iteration, up to the first layer of its hot pass."""
    engine.engine.prepare()
    assert engine.engine.begin_hot(engine.engine.compute_cold())
    assert engine.engine.advance_hot()
    engine.book()


def test_a_call_does_not_wait_for_the_pass_under_way(make_engine: MakeEngine, reference: PeftReference) -> None:
    """It has its first token while the flood's rows stand still, and then goes on beside them, unharmed."""
    engine = make_engine(max_rows=16)
    flood = flooded(engine)
    begin(engine)
    before = {request: len(engine.outcomes[request].tokens) for request in flood}
    call = engine.submit(STORY, 9, tenant="v0", ignore_eos=True)
    assert engine.engine.advance_hot()
    engine.book()
    assert len(engine.outcomes[call].tokens) == 1
    assert before == {request: len(engine.outcomes[request].tokens) for request in flood}
    while engine.engine.advance_hot():
        pass
    engine.book()
    assert sum(len(engine.outcomes[r].tokens) - before[r] for r in flood) == sum(map(bool, before.values()))
    engine.run(until=lambda: engine.outcomes[call].finished is not None)
    tally = Tally()
    assert not check(engine, reference, Case(None, None, STORY, 9), engine.outcomes[call].tokens, tally)
    end(engine)


def test_one_that_ends_before_the_pass_begins_is_no_row_of_it(make_engine: MakeEngine) -> None:
    """What it held may be another's by then."""
    engine = make_engine(max_rows=16)
    flooded(engine)
    call = engine.submit(STORY, 1, tenant="v0", ignore_eos=True)
    begin(engine)
    assert engine.outcomes[call].finished is not None and len(engine.outcomes[call].tokens) == 1
    assert engine.engine.hot.open is not None
    assert call not in [row.request.id for row in engine.engine.hot.open.rows]
    end(engine)


def test_only_who_asks_for_little_goes_first_and_only_past_a_crowd(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=16)
    others = [engine.submit(STORY, 100, tenant=f"t{i}", ignore_eos=True) for i in range(6)]
    engine.run(until=lambda: len(engine.outcomes[others[0]].tokens) > 1)
    begin(engine)
    call = engine.submit(STORY, 2, tenant="v0", ignore_eos=True)
    while engine.engine.advance_hot():
        engine.book()
    assert engine.outcomes[call].admitted
    assert not engine.outcomes[call].tokens, "nobody waits for room: it is computed with the others"
    engine.step()
    assert engine.outcomes[call].tokens
    end(engine)
    flood = flooded(engine)
    begin(engine)
    late = engine.submit(STORY, 2, tenant="flood", ignore_eos=True)
    two = [engine.submit(STORY, 2, tenant="v0", ignore_eos=True) for _ in range(2)]
    while engine.engine.advance_hot():
        engine.book()
    assert [bool(engine.outcomes[r].tokens) for r in (late, *two)] == [False, True, True]
    assert len(engine.engine.queue) > len(flood) // 2
    end(engine)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_batch_goes_on_whatever_comes(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """With a tenant's first call after every layer each iteration still takes every row that decodes on by a token,
    after one chunk of newcomers' prompts, in MOST_PASSES passes, at most."""
    engine, rng, passes = make_engine(max_rows=16), random.Random(chunk), list[int]()
    flooded(engine)
    compute = engine.engine.hot.compute

    def counted(rows: list[Row]) -> None:
        passes.append(sum(row.length for row in rows))
        compute(rows)

    monkeypatch.setattr(engine.engine.hot, "compute", counted)
    engine.engine.limits = replace(engine.engine.limits, chunk_tokens=chunk)
    overtook = 0
    for _ in range(40):
        engine.engine.prepare()
        decoding = [(r, r.generated) for r in engine.engine.running.values() if r.decoding]
        assert engine.engine.begin_hot(0)
        while engine.engine.advance_hot():
            prompt = [1, *(rng.randrange(3, 500) for _ in range(rng.randint(0, 2 * chunk)))]
            engine.submit(prompt, 2, tenant=f"late{len(engine.outcomes)}", ignore_eos=True)
        assert all(r.generated == generated + 1 for r, generated in decoding)
        assert sum(passes) <= chunk
        assert len(passes) <= MOST_PASSES
        overtook += sum(passes)
        passes.clear()
    assert overtook > 40 * chunk // 4
    end(engine)


def test_answers_are_those_of_peft_wherever_calls_come(
    make_engine: MakeEngine, reference: PeftReference, drawn_adapters: list[Path]
) -> None:
    """Between any two layers, with adapters of other ranks than the flood's, in several chunks or one."""
    engine, rng, tally, problems = make_engine(max_rows=8), random.Random(5), Tally(), list[str]()
    kinds = [Case(path, engine.deploy(path), [], 0) for path in drawn_adapters[:4]] + [Case(None, None, [], 0)]
    for kind in kinds:
        engine.submit(STORY, 1, kind.adapter)
    engine.run()
    engine.engine.limits = replace(engine.engine.limits, chunk_tokens=48)
    sent: dict[str, Case] = {}

    def send(tenant: str) -> None:
        kind = rng.choice(kinds)
        case = Case(kind.directory, kind.adapter, [1, *(rng.randrange(3, 500) for _ in range(rng.randint(0, 60)))], 6)
        sent[engine.submit(case.prompt, case.max_tokens, case.adapter, tenant=tenant)] = case

    def arrive() -> None:
        if rng.random() < 0.15:
            send(rng.choice(VICTIMS))

    for _ in range(40):
        send("flood")
    while engine.engine.queue:
        engine.step(arrive)
    engine.run()
    for request, case in sent.items():
        problems += check(engine, reference, case, engine.outcomes[request].tokens, tally)
    assert not problems
    assert len(sent) > 50


def test_a_cancelled_row_is_let_go_when_the_pass_has_ended(make_engine: MakeEngine) -> None:
    """What it wrote to is nobody else's before. Its caller is told at once."""
    engine = make_engine(max_rows=16)
    flood = flooded(engine)
    begin(engine)
    gone = next(r for r in flood if r in engine.engine.running)
    blocks, tokens = list(engine.engine.running[gone].blocks), len(engine.outcomes[gone].tokens)
    engine.engine.cancel(gone)
    call = engine.submit([*STORY, *range(20, 80)], 20, tenant="v1", ignore_eos=True)
    assert engine.engine.advance_hot()
    engine.book()
    assert engine.outcomes[gone].finished is not None
    assert engine.outcomes[call].tokens
    assert not set(blocks) & set(engine.engine.running[call].blocks)
    while engine.engine.advance_hot():
        pass
    engine.step()
    assert len(engine.outcomes[gone].tokens) == tokens
    assert gone not in engine.engine.running
    end(engine)


def test_a_pass_that_nobody_wants_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=4)
    requests = [engine.submit(STORY, 20, ignore_eos=True) for _ in range(3)]
    engine.run(until=lambda: len(engine.outcomes[requests[0]].tokens) > 1)
    begin(engine)
    for request in requests:
        engine.engine.cancel(request)
    assert not engine.engine.advance_hot()
    assert not engine.engine.busy
    engine.assert_clean()


def test_no_row_of_a_pass_under_way_is_preempted(make_engine: MakeEngine) -> None:
    engine = make_engine(max_rows=4)
    flooded(engine, slo_class="best_effort")
    strict = [engine.submit(STORY, 3, tenant=f"s{i}", slo_class="strict", ignore_eos=True) for i in range(2)]
    begin(engine)
    strict += [engine.submit(STORY, 3, tenant="s2", slo_class="strict", ignore_eos=True)]
    computed = set(engine.engine.running)
    while engine.engine.advance_hot():
        assert computed <= set(engine.engine.running)
    engine.step()
    assert all(engine.outcomes[request].admitted for request in strict)
    end(engine)
