"""Beside a flood, prompts of tenants that ask for little are computed before the batch, whose passes are kept short."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.performance_fit import decode_forecast
from node_agent.engine.hot import Computed, OutOfMemory
from node_agent.engine.joining import Joined
from node_agent.engine.promises import BESIDE_FLOOD, MIN_BESIDE_FLOOD, UNKNOWN_SHARE
from node_agent.engine.rows import Row
from node_agent.performance.drift import Drift
from node_agent.performance.terms import decode_sample
from tests.node_agent.test_chunks_within_promises import MODEL
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

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


def watch(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Row], int]]:
    """Rows of each pass from now on, and how many of them decode."""
    passes, compute = list[tuple[list[Row], int]](), engine.engine.hot.compute

    def watched(rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
        passes.append((rows, n_decode))
        return compute(rows, n_decode, joined)

    monkeypatch.setattr(engine.engine.hot, "compute", watched)
    return passes


def test_a_call_has_its_first_token_before_the_batch_goes_on(make_engine: MakeEngine, reference: PeftReference) -> None:
    """And then goes on beside it, unharmed."""
    engine = make_engine(max_rows=16)
    flood = flooded(engine)
    before = {request: len(engine.outcomes[request].tokens) for request in flood}
    call = engine.submit(STORY, 9, tenant="v0", ignore_eos=True)
    engine.engine.prepare()
    passes = engine.engine.compute_hot(engine.engine.compute_cold())
    next(passes)
    engine.book()
    assert len(engine.outcomes[call].tokens) == 1
    assert before == {request: len(engine.outcomes[request].tokens) for request in flood}
    assert len(list(passes)) == 1
    engine.book()
    assert len(engine.outcomes[call].tokens) == 2
    assert sum(len(engine.outcomes[r].tokens) - before[r] for r in flood) == sum(map(bool, before.values()))
    engine.run(until=lambda: engine.outcomes[call].finished is not None)
    tally = Tally()
    assert not check(engine, reference, Case(None, None, STORY, 9), engine.outcomes[call].tokens, tally)
    engine.end()


def test_one_that_ends_with_its_first_token_is_no_row_of_the_batch(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it held may be another's by then."""
    engine = make_engine(max_rows=16)
    flooded(engine)
    call, passes = engine.submit(STORY, 1, tenant="v0", ignore_eos=True), watch(engine, monkeypatch)
    engine.step()
    assert engine.outcomes[call].finished is not None and len(engine.outcomes[call].tokens) == 1
    assert [call in [row.request.id for row in rows] for rows, _ in passes] == [True, False]
    engine.end()


def test_only_who_asks_for_little_goes_first_and_only_past_a_crowd(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_rows=16)
    others = [engine.submit(STORY, 100, tenant=f"t{i}", ignore_eos=True) for i in range(6)]
    engine.run(until=lambda: len(engine.outcomes[others[0]].tokens) > 1)
    passes = watch(engine, monkeypatch)
    call = engine.submit(STORY, 2, tenant="v0", ignore_eos=True)
    engine.step()
    assert engine.outcomes[call].tokens
    assert len(passes) == 1, "nobody waits for room: it is computed with the others"
    engine.end()
    flood = flooded(engine)
    passes.clear()
    late = engine.submit(STORY, 2, tenant="flood", ignore_eos=True)
    two = [engine.submit(STORY, 2, tenant="v0", ignore_eos=True) for _ in range(2)]
    engine.step()
    assert [row.request.id for row in passes[0][0]] == two
    assert [bool(engine.outcomes[r].tokens) for r in (late, *two)] == [False, True, True]
    assert len(engine.engine.queue) > len(flood) // 2
    engine.end()


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_batch_goes_on_whatever_comes(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """With tenants' first calls in every iteration each row that decodes goes on by a token, after one chunk of their
    prompts at most."""
    engine, rng = make_engine(max_rows=16), random.Random(chunk)
    flooded(engine)
    passes, overtook = watch(engine, monkeypatch), 0
    engine.engine.limits = replace(engine.engine.limits, chunk_tokens=chunk)
    for _ in range(40):
        for _ in range(rng.randint(0, 2)):
            prompt = [1, *(rng.randrange(3, 500) for _ in range(rng.randint(0, 2 * chunk)))]
            engine.submit(prompt, 2, tenant=f"late{len(engine.outcomes)}", ignore_eos=True)
        engine.engine.prepare()
        decoding = [(r, r.generated) for r in engine.engine.running.values() if r.decoding]
        assert list(engine.engine.compute_hot(0))
        assert all(r.generated == generated + 1 for r, generated in decoding)
        assert len(passes) <= 2
        first = [sum(row.length for row in rows) for rows, n_decode in passes if not n_decode]
        assert sum(first) <= chunk
        overtook += sum(first)
        passes.clear()
        engine.book()
    assert overtook > 40 * chunk // 8
    engine.end()


@pytest.mark.parametrize("model", [None, MODEL], ids=["not measured", "measured"])
def test_chunks_are_cut_beside_a_flood_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, model: object
) -> None:
    """So that nobody waits for a long pass; yet every prompt of the flood gets its turn."""
    engine = make_engine(max_rows=16, chunk_tokens=64)
    most, passes = engine.engine.limits.chunk_tokens, watch(engine, monkeypatch)
    if model is not None:
        engine.engine.drift = Drift(MODEL)
        monkeypatch.setattr(engine.engine.drift, "observe", lambda *_: None)
    engine.submit([1] * 200, 2, ignore_eos=True)
    engine.run()
    assert max(sum(row.length for row in rows) for rows, _ in passes) == most
    passes.clear()
    for victim in VICTIMS:
        engine.submit(STORY, 1, tenant=victim)
    engine.run()
    flood = [engine.submit([1] * 100, 8, tenant="flood", ignore_eos=True) for _ in range(40)]
    beside = list[tuple[list[Row], int]]()
    while engine.engine.queue:
        engine.engine.prepare()
        crowded = engine.engine.queue and engine.engine.scheduler.reserves(16).crowded
        passes.clear()
        assert list(engine.engine.compute_hot(0))
        beside += [(rows, n) for rows, n in passes if crowded and 0 < n < len(rows)]
        engine.book()
    assert any(engine.outcomes[request].finished for request in flood)
    assert len(beside) > 10
    for rows, n_decode in beside:
        tokens, least = sum(row.length for row in rows[n_decode:]), most // MIN_BESIDE_FLOOD
        if model is None:
            assert tokens <= most // UNKNOWN_SHARE
        else:
            step = decode_forecast(MODEL.decode, decode_sample(rows[:n_decode], 0.0))
            assert tokens <= max(least, (BESIDE_FLOOD - 1.0) * step / MODEL.prefill.per_token + 1)
    engine.end()


@pytest.mark.parametrize("other", [None, "light", "strict"])
def test_a_flood_alone_has_whole_chunks(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    """Nobody else would wait for them; with whole chunks it has more of its calls done."""
    engine = make_engine(max_rows=16, chunk_tokens=64)
    if other is not None:
        slo_class = "strict" if other == "strict" else "standard"
        engine.submit(STORY, 1, tenant="other", slo_class=slo_class, ttft=5.0)
        engine.run()
    flood = [engine.submit([1] * 100, 40, tenant="flood", ignore_eos=True) for _ in range(40)]
    passes, lengths = watch(engine, monkeypatch), set[int]()
    while not any(engine.outcomes[request].finished for request in flood):
        passes.clear()
        engine.step()
        lengths |= {sum(row.length for row in rows[n:]) for rows, n in passes if 0 < n < len(rows)}
    assert max(lengths) == (64 - 1 if other is None else 64 // UNKNOWN_SHARE)
    engine.end()


def test_answers_are_those_of_peft_wherever_calls_come(
    make_engine: MakeEngine, reference: PeftReference, drawn_adapters: list[Path]
) -> None:
    """Before any iteration, with adapters of other ranks than the flood's, in several chunks or one."""
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

    for _ in range(40):
        send("flood")
    while engine.engine.queue:
        if rng.random() < 0.4:
            send(rng.choice(VICTIMS))
        engine.step()
    engine.run()
    for request, case in sent.items():
        problems += check(engine, reference, case, engine.outcomes[request].tokens, tally)
    assert not problems
    assert len(sent) > 50
