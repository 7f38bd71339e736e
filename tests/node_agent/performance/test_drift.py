"""The model follows a host that has become slower or faster, and nothing else. No clock: times are given."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Sampling
from cluster.performance_model import RANK_TERMS, DecodeModel, ModelKey, PerformanceModel, PrefillModel, Transfer
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.stats import stats_of
from node_agent.leases import Lease
from node_agent.performance.drift import BOUND, EVERY, MEMORY, STEP, WORTH, Drift
from node_agent.performance.terms import decode_sample, prefill_sample
from tests.support.local_engine import MakeEngine

MEASURED = PerformanceModel(
    ModelKey("here", "fingerprint", "float32", "cpu", "0"),
    DecodeModel(0.02, 1e-3, 1e-6, 1e-5, "adapter_ranks"),
    PrefillModel(0.01, 1e-3, 1e-7, 1e-6),
    Transfer(0.0, 1e9),
    Transfer(0.0, 1e8),
)


def row(context: int, length: int, slot: int = -1, rank: int = 0) -> Row:
    request = Request("r", "", [1] * (context + length), 1, Sampling(), 0.0, None, True)
    request.computed = context
    request.lease = Lease(f"d{slot}", slot, (1, rank)) if slot >= 0 else None
    return Row(request, length)


BATCH = [row(10, 1), row(20, 1, 0, 8), row(30, 1, 0, 8), row(40, 1, 3, 64)]
PROMPTS = [row(0, 10, 0, 8), row(5, 5)]
DECODE = MEASURED.decode.seconds(4, 100, 72)
PREFILL = MEASURED.prefill.seconds(15, 175, 80)


def test_the_terms_of_a_batch() -> None:
    found = decode_sample(BATCH, 1.0)
    terms = {term: getattr(found, term) for term in RANK_TERMS}
    assert terms == {"max_rank": 4 * 64, "request_ranks": 80, "adapter_ranks": 72}
    assert (found.rows, found.contexts) == (4, 100)


def test_chunks_have_the_square_of_their_prompt() -> None:
    whole = prefill_sample([row(0, 100, 0, 8)], 1.0)
    parts = [prefill_sample([row(begin, 25, 0, 8)], 1.0) for begin in (0, 25, 50, 75)]
    assert whole.squares == sum(part.squares for part in parts) == 100 * 100
    assert whole.token_ranks == sum(part.token_ranks for part in parts) == 800


def test_without_drift_the_model_stays_the_same_object() -> None:
    drift = Drift(MEASURED)
    assert drift.forecast_ratio is None
    for _ in range(200):
        drift.observe(BATCH, len(BATCH), DECODE * 1.01)
        drift.observe(PROMPTS, 0, PREFILL * 0.99)
    assert drift.published is MEASURED
    assert drift.forecast_ratio == pytest.approx(1.0, abs=0.011)


@given(st.floats(0.55, 1.9), st.floats(0.55, 1.9), st.integers(0, 1000))
def test_a_lasting_change_is_followed_in_small_steps(decode: float, prefill: float, seed: int) -> None:
    draw, drift = random.Random(seed), Drift(MEASURED)
    for _ in range(40 * EVERY):
        before = drift.published
        drift.observe(BATCH, len(BATCH), DECODE * decode * draw.uniform(0.95, 1.05))
        drift.observe(PROMPTS, 0, PREFILL * prefill * draw.uniform(0.95, 1.05))
        for now, old in ((drift.published.decode, before.decode), (drift.published.prefill, before.prefill)):
            assert 1 / STEP - 1e-9 <= now.base / old.base <= STEP + 1e-9
    assert drift.published.decode.seconds(4, 100, 72) == pytest.approx(DECODE * decode, rel=WORTH + 0.03)
    assert drift.published.prefill.seconds(15, 175, 80) == pytest.approx(PREFILL * prefill, rel=WORTH + 0.03)
    assert drift.forecast_ratio == pytest.approx(1.0, abs=WORTH + 0.05)
    assert drift.published.to_device == MEASURED.to_device


@given(st.integers(0, 1000), st.sampled_from([1e-3, 50.0, 1e6]))
def test_outliers_move_nothing(seed: int, times: float) -> None:
    """A third of the passes."""
    draw, drift = random.Random(seed), Drift(MEASURED)
    order = [i % 3 == 0 for i in range(300)]
    for i in range(0, len(order), 9):
        chunk = order[i : i + 9]
        draw.shuffle(chunk)
        for outlier in chunk:
            drift.observe(BATCH, len(BATCH), DECODE * (times if outlier else 1.0))
    assert drift.published is MEASURED
    assert drift.forecast_ratio == 1.0


def test_a_change_beyond_the_bounds_is_shown() -> None:
    drift = Drift(MEASURED)
    for _ in range(40 * EVERY):
        drift.observe(BATCH, len(BATCH), DECODE * 10)
    assert drift.published.decode.base == pytest.approx(MEASURED.decode.base * BOUND, rel=WORTH + 1e-9)
    assert drift.forecast_ratio == pytest.approx(10 / BOUND, rel=WORTH + 1e-3)
    for _ in range(60 * EVERY):
        drift.observe(BATCH, len(BATCH), DECODE)
    assert drift.published.decode.base == pytest.approx(MEASURED.decode.base, rel=WORTH + 1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_teach_nothing(seconds: float) -> None:
    drift = Drift(MEASURED)
    for _ in range(2 * MEMORY):
        drift.observe(BATCH, len(BATCH), seconds)
    assert (drift.published is MEASURED, drift.forecast_ratio) == (True, None)


def test_a_pass_of_both_kinds_teaches_nothing_of_either() -> None:
    drift = Drift(MEASURED)
    for _ in range(2 * MEMORY):
        drift.observe([*BATCH, *PROMPTS], len(BATCH), 100.0)
    assert (drift.published is MEASURED, drift.forecast_ratio) == (True, None)


@given(slower=st.floats(1 / BOUND, BOUND), seed=st.integers(0, 2**32 - 1))
def test_how_long_passes_of_both_kinds_take_is_followed_apart(slower: float, seed: int) -> None:
    """One in ten is disturbed. What a pass begins with counts once."""
    draw, drift = random.Random(seed), Drift(MEASURED)
    forecast = DECODE + PREFILL - MEASURED.prefill.base
    for _ in range(20 * EVERY):
        disturbed = 10 if draw.random() < 0.1 else 1
        drift.observe([*BATCH, *PROMPTS], len(BATCH), forecast * slower * disturbed)
    assert drift.both.value == pytest.approx(slower, rel=2 * WORTH)
    assert drift.published is MEASURED


def test_a_slower_host_that_single_kinds_have_told_of_counts_once() -> None:
    drift = Drift(MEASURED)
    both = 1.5 * (DECODE + PREFILL - MEASURED.prefill.base)
    for _ in range(20 * EVERY):
        drift.observe(BATCH, len(BATCH), 1.5 * DECODE)
        drift.observe(PROMPTS, 0, 1.5 * PREFILL)
        drift.observe([*BATCH, *PROMPTS], len(BATCH), both)
    assert drift.published.decode.base == pytest.approx(1.5 * MEASURED.decode.base, rel=2 * WORTH)
    assert drift.both.value == pytest.approx(1.0, rel=3 * WORTH)


def test_an_engine_that_serves_says_what_it_forecasts(
    make_engine: MakeEngine, stories_adapters: dict[str, Path]
) -> None:
    engine = make_engine()
    adapter = engine.deploy(next(iter(stories_adapters.values())))
    request = engine.submit([1, *range(50, 70)], 40, adapter, ignore_eos=True)
    engine.run(until=lambda: bool(engine.outcomes[request].tokens))
    stats = stats_of(engine.engine)
    assert (stats.performance, stats.forecast_ratio) == (None, None)
    assert stats.batch_slots[0] >= 0
    assert stats.prompt_tokens_left == 0
    engine.engine.drift = Drift(MEASURED)
    engine.run()
    after = stats_of(engine.engine)
    assert after.performance is engine.engine.drift.published
    assert after.forecast_ratio is not None and after.forecast_ratio > 0
    assert after.batch_slots == []


def test_what_is_left_of_prompts(make_engine: MakeEngine) -> None:
    engine = make_engine(chunk_tokens=16)
    request = engine.submit([1] * 50, 2)
    engine.engine.prepare()
    assert stats_of(engine.engine).prompt_tokens_left == 50
    assert stats_of(engine.engine).batch_slots == [-1]
    list(engine.engine.compute_hot(0))
    assert stats_of(engine.engine).prompt_tokens_left == 34
    engine.run()
    assert len(engine.outcomes[request].tokens) == 2
