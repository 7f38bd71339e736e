"""Prompts leave strict requests the time between tokens that they were promised, and are never stopped by it; best
effort pauses for strict ones."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.messages import Sampling, SloClass
from cluster.node_load import MARGIN
from cluster.performance_model import DecodeModel, PrefillModel
from node_agent.engine.hot import Computed, OutOfMemory
from node_agent.engine.joining import Joined
from node_agent.engine.promises import MAX_PAUSES, within_promise
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.stats import stats_of
from node_agent.performance.drift import Drift
from tests.node_agent.performance.test_drift import MEASURED
from tests.node_agent.test_scheduling_of_loads import Valve
from tests.support.local_engine import MakeEngine

MODEL = replace(
    MEASURED, decode=DecodeModel(0.02, 1e-3, 1e-6, 1e-5, "adapter_ranks"), prefill=PrefillModel(0.02, 1e-3, 0.0, 0.0)
)
ALONE = MODEL.decode.seconds(1, 0, 0)
STORY = [1, 403, 407, 261]


def decoding(context: int, slo_class: SloClass = "standard", tpot: float | None = None) -> Request:
    tokens = [1] * (context + 1)
    request = Request("r", "t", tokens, 8, Sampling(), 1e9, None, False, slo_class=slo_class, tpot=tpot)
    request.prompt_len, request.computed = context, context
    return request


def prompt(length: int, slo_class: SloClass) -> Request:
    return Request("p", "t", [1] * length, 8, Sampling(), 1e9, None, False, slo_class=slo_class, tpot=0.1)


@given(
    contexts=st.lists(st.integers(1, 4000), min_size=1, max_size=32),
    tpot=st.floats(ALONE, 1.0),
    other=st.none() | st.floats(0.001, 1.0),
    least=st.integers(0, 64),
    slower=st.floats(0.5, 2.0),
    used=st.integers(0, 64),
)
def test_what_is_left_fills_the_promise(
    contexts: list[int], tpot: float, other: float | None, least: int, slower: float, used: int
) -> None:
    """By the model's own forecast, and no faster than it, cold passes' tokens among it; standard requests' promises
    don't count."""
    rows = [decoding(contexts[0], "strict", tpot), *(decoding(c, tpot=other) for c in contexts[1:])]
    taking_part, left = within_promise(MODEL, rows, [], 256, least, slower, used)
    assert taking_part == rows
    spare = left + used
    forecast = MODEL.decode.seconds(len(rows), sum(contexts), 0) + MODEL.prefill.per_token * spare
    assert spare >= least - 1e-9
    assert spare == pytest.approx(least) or forecast * max(1.0, slower) == pytest.approx(MARGIN * tpot)


def test_without_a_strict_promise_or_a_model_there_is_no_limit() -> None:
    """Nor for a promise that can't be kept for one alone. Then nobody has paused in succession any more."""
    strict, best_effort = decoding(9, "strict", 0.03), decoding(9, "best_effort")
    for model, running in [
        (MODEL, [best_effort, decoding(9, "strict"), decoding(9, tpot=0.03)]),
        (MODEL, [best_effort, decoding(9, "strict", 0.999 * ALONE)]),
        (MODEL, []),
        (None, [strict, best_effort]),
    ]:
        best_effort.pauses = 2
        assert within_promise(model, running, [prompt(99, "strict")], 256, 1) == (running, inf)
        assert best_effort.pauses == (0 if running else 2)


@given(
    st.integers(1, 300),
    st.integers(1, 256),
    st.lists(
        st.tuples(st.sampled_from(["strict", "standard", "best_effort"]), st.integers(0, MAX_PAUSES)), max_size=24
    ),
    st.floats(ALONE, 0.2),
)
def test_best_effort_sits_out_as_few_as_will_do(
    length: int, most: int, others: list[tuple[SloClass, int]], tpot: float
) -> None:
    """The same by trying every number of them, the least often paused first."""
    rows = [decoding(20, "strict", tpot), *(decoding(20, slo_class) for slo_class, _ in others)]
    for request, (_, pauses) in zip(rows[1:], others, strict=True):
        request.pauses = pauses
    may_pause = [pauses for slo_class, pauses in others if slo_class == "best_effort" and pauses < MAX_PAUSES]
    wanted, needed = min(length, most), len(may_pause)
    for pausing in reversed(range(len(may_pause) + 1)):
        n = len(rows) - pausing
        if (MARGIN * tpot - MODEL.decode.seconds(n, 20 * n, 0)) / MODEL.prefill.per_token >= wanted:
            needed = pausing
    before = [request.pauses for request in rows]
    taking_part, _ = within_promise(MODEL, rows, [prompt(length, "strict"), prompt(99, "standard")], most, 0)
    paused = [was for request, was in zip(rows, before, strict=True) if request not in taking_part]
    assert sorted(paused) == sorted(may_pause)[:needed]
    assert len(taking_part) == len(rows) - needed
    for request, was in zip(rows, before, strict=True):
        assert request.pauses == (0 if request in taking_part else was + 1)


def test_best_effort_pauses_for_strict_tokens_but_not_for_others_prompts() -> None:
    """22 ms are for the next token of one row."""
    best_effort = [decoding(20, "best_effort") for _ in range(20)]
    ample, scarce = decoding(20, "strict", 0.2), decoding(20, "strict", 0.022 / MARGIN)
    standard = [prompt(200, "standard")]
    assert within_promise(MODEL, [ample, *best_effort], standard, 256, 1)[0] == [ample, *best_effort]
    assert within_promise(MODEL, [scarce, *best_effort], standard, 256, 1)[0] == [scarce]


def test_nobody_pauses_for_nothing() -> None:
    """Where rows cost nothing, a pass without them has no more time for prompts; nor where prompts cost nothing, unless
    it takes too long by itself."""
    best_effort, strict = [decoding(20, "best_effort") for _ in range(8)], decoding(20, "strict", 0.03)
    rows, prompts = [strict, *best_effort], [prompt(200, "strict")]
    flat = replace(MODEL, decode=replace(MODEL.decode, flat_rows=16))
    assert within_promise(flat, rows, prompts, 256, 0)[0] == rows
    free = replace(MODEL, prefill=replace(MODEL.prefill, per_token=0.0))
    ample = [decoding(20, "strict", 0.05), *best_effort]
    assert within_promise(free, ample, prompts, 256, 0) == (ample, inf)
    taking_part, spare = within_promise(free, rows, prompts, 256, 0)
    assert (len(taking_part), spare) == (3, inf), "24 ms are for three rows"


def test_all_sit_out_as_often() -> None:
    """Three of eight in each pass, whatever their order."""
    best_effort, strict = [decoding(0, "best_effort") for _ in range(8)], decoding(0, "strict", 0.0265 / MARGIN)
    for _ in range(120):
        assert len(within_promise(MODEL, [strict, *best_effort], [], 256, 0)[0]) == 6
    assert {request.pauses_in_all for request in best_effort} == {45}


def test_cold_passes_and_slow_mixed_ones_count() -> None:
    """What cold passes of the iteration took has been taken; passes without prompts are as fast as forecast."""
    best_effort, strict = [decoding(0, "best_effort") for _ in range(5)], decoding(0, "strict", 0.04)
    rows, prompts = [strict, *best_effort], [prompt(5, "strict")]
    assert within_promise(MODEL, rows, prompts, 256, 0, used=0) == (rows, pytest.approx(6))
    taking_part, spare = within_promise(MODEL, rows, prompts, 256, 0, used=4)
    assert (len(taking_part), spare) == (3, pytest.approx(5))
    assert len(within_promise(MODEL, rows, [], 256, 0, slower=1.25)[0]) == 6
    assert len(within_promise(MODEL, rows, [prompt(9, "standard")], 256, 0, slower=1.25)[0]) == 5


def test_best_effort_goes_on_in_every_fourth_pass(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While strict prompts come without end; all it says is what it says alone, and the promise's passes go on."""
    engine, taking_part = make_engine(max_rows=8, chunk_tokens=64), list[bool]()
    alone = engine.submit(STORY, 8, ignore_eos=True)
    engine.run()
    engine.engine.drift = Drift(MODEL)
    monkeypatch.setattr(engine.engine.drift, "observe", lambda *_: None)
    compute = engine.engine.hot.compute

    def counted(rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
        taking_part.append(any(row.request.slo_class == "best_effort" for row in rows[:n_decode]))
        return compute(rows, n_decode, joined)

    call = engine.submit(STORY, 8, slo_class="best_effort", ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[call].tokens))
    strict = engine.submit(STORY, 90, slo_class="strict", tpot=0.022 / MARGIN, ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[strict].tokens))
    prompts = [engine.submit([1] * 100, 1, slo_class="strict", tpot=0.1, ignore_eos=True) for _ in range(5)]
    monkeypatch.setattr(engine.engine.hot, "compute", counted)
    engine.run(until=lambda: engine.outcomes[call].finished is not None)
    first = taking_part.index(True)  # it may have sat out some before
    assert first <= MAX_PAUSES
    assert taking_part[first + 1 : first + 9] == [False, False, False, True] * 2
    passes = zip(*(taking_part[i:] for i in range(MAX_PAUSES + 1)), strict=False)
    assert all(sum(four) == 1 for four in passes)
    assert not any(engine.outcomes[each].finished for each in prompts[1:])
    engine.run()
    assert engine.outcomes[call].tokens == engine.outcomes[alone].tokens


def test_nobody_pauses_for_a_prompt_that_waits_for_its_adapter(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, drawn_adapters: list[Path]
) -> None:
    engine, taking_part = make_engine(max_rows=8, chunk_tokens=64, cold_start="wait"), list[int]()
    slow, valve = engine.deploy(drawn_adapters[0]), Valve(engine)
    valve.hold(slow)
    engine.engine.drift = Drift(MODEL)
    monkeypatch.setattr(engine.engine.drift, "observe", lambda *_: None)
    calls = [engine.submit(STORY, 90, slo_class="best_effort", ignore_eos=True) for _ in range(4)]
    calls.append(engine.submit(STORY, 60, slo_class="strict", tpot=0.04 / MARGIN, ignore_eos=True))
    engine.run(until=lambda: all(engine.outcomes[call].tokens for call in calls))
    calls.append(engine.submit([1] * 100, 2, slow, slo_class="strict", tpot=0.5, ignore_eos=True))
    compute = engine.engine.hot.compute

    def counted(rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
        taking_part.append(sum(row.request.slo_class == "best_effort" for row in rows[:n_decode]))
        return compute(rows, n_decode, joined)

    monkeypatch.setattr(engine.engine.hot, "compute", counted)
    for _ in range(20):
        engine.step()
    assert set(taking_part) == {4}
    taking_part.clear()
    valve.open()
    engine.run()
    assert min(taking_part) < 4, "now there is something to gain"
    assert all(engine.outcomes[call].finished for call in calls)


@pytest.mark.parametrize(("slower", "most"), [(1.0, 19), (1.25, 11)])
def test_chunks_follow_a_strict_promise(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, slower: float, most: int
) -> None:
    """They are cut while it decodes, shorter where passes take longer than forecast, are whole before and after, and
    all prompts are computed."""
    engine, chunks = make_engine(max_rows=8, chunk_tokens=64), list[tuple[bool, int]]()
    engine.engine.drift = Drift(MODEL)
    engine.engine.drift.both.value = slower
    monkeypatch.setattr(engine.engine.drift, "observe", lambda *_: None)
    compute = engine.engine.hot.compute

    def counted(rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
        strict = any(row.request.slo_class == "strict" for row in rows[:n_decode])
        chunks.append((strict, sum(row.length for row in rows[n_decode:])))
        return compute(rows, n_decode, joined)

    monkeypatch.setattr(engine.engine.hot, "compute", counted)
    first = engine.submit([1] * 60, 2)
    engine.run()
    call = engine.submit(STORY, 6, slo_class="strict", tpot=0.04 / MARGIN, ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[call].tokens))
    others = [engine.submit([1] * 200, 2) for _ in range(2)]
    engine.run()
    assert chunks[0] == (False, 60)
    beside = {tokens for strict, tokens in chunks if strict and tokens > 4}
    assert beside
    assert beside <= {most - 2, most - 1, most}
    assert max(tokens for strict, tokens in chunks if not strict) > 60
    assert all(engine.outcomes[request].tokens for request in (first, call, *others))


def test_a_node_tells_how_many_rows_would_pause(make_engine: MakeEngine) -> None:
    """None without a performance model: nobody pauses there."""
    engine = make_engine(max_rows=16, chunk_tokens=64)
    calls = [engine.submit(STORY, 90, slo_class="best_effort", ignore_eos=True) for _ in range(6)]
    calls.append(engine.submit(STORY, 90, ignore_eos=True))
    engine.run(until=lambda: all(len(engine.outcomes[call].tokens) > 1 for call in calls))
    found = stats_of(engine.engine).strict
    assert found is not None and (found.paused_rows, found.paused_contexts) == (0, 0)
    engine.engine.drift = Drift(MODEL)
    contexts = [r.computed for r in engine.engine.running.values() if r.slo_class == "best_effort"]
    found = stats_of(engine.engine).strict
    assert found is not None and (found.paused_rows, found.paused_contexts) == (4, sum(contexts) * 3 // 4)
    assert found.tightest_tpot is None
    calls = [engine.submit(STORY, 20, slo_class="strict", tpot=tpot, ignore_eos=True) for tpot in (1e-3, 0.2, 0.1)]
    engine.run(until=lambda: all(engine.outcomes[call].tokens for call in calls))
    found = stats_of(engine.engine).strict
    assert found is not None and found.tightest_tpot == 0.1
    engine.run()
