"""Prompts leave strict requests the time between tokens that they were promised, and are never stopped by it."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.local_engine import MakeEngine
from cluster.messages import Sampling, SloClass
from cluster.performance_model import DecodeModel, PrefillModel
from node_agent.engine.batch import Row
from node_agent.engine.promises import MARGIN, spare_tokens
from node_agent.engine.request import Request
from node_agent.performance.drift import Drift
from tests.node_agent.performance.test_drift import MEASURED

MODEL = replace(
    MEASURED, decode=DecodeModel(0.02, 1e-3, 1e-6, 1e-5, "adapter_ranks"), prefill=PrefillModel(0.02, 1e-3, 0.0, 0.0)
)
STORY = [1, 403, 407, 261]


def decoding(context: int, slo_class: SloClass = "standard", tpot: float | None = None) -> Request:
    tokens = [1] * (context + 1)
    request = Request("r", "t", tokens, 8, Sampling(), 1e9, None, False, slo_class=slo_class, tpot=tpot)
    request.prompt_len, request.computed = context, context
    return request


@given(
    contexts=st.lists(st.integers(1, 4000), min_size=1, max_size=32),
    tpot=st.floats(0.001, 1.0),
    other=st.none() | st.floats(0.001, 1.0),
    least=st.integers(0, 64),
    slower=st.floats(0.5, 2.0),
)
def test_what_is_left_fills_the_promise(
    contexts: list[int], tpot: float, other: float | None, least: int, slower: float
) -> None:
    """By the model's own forecast, and no faster than it; standard requests' promises don't count."""
    rows = [decoding(contexts[0], "strict", tpot), *(decoding(c, tpot=other) for c in contexts[1:])]
    spare = spare_tokens(MODEL, rows, least, slower)
    forecast = MODEL.decode.seconds(len(rows), sum(contexts), 0) + MODEL.prefill.per_token * spare
    assert spare >= least
    assert spare == least or forecast * max(1.0, slower) == pytest.approx(MARGIN * tpot)


def test_without_a_strict_promise_or_a_model_there_is_no_limit() -> None:
    assert spare_tokens(MODEL, [decoding(9), decoding(9, "strict"), decoding(9, tpot=0.1)], 1) == inf
    assert spare_tokens(MODEL, [], 1) == inf
    assert spare_tokens(None, [decoding(9, "strict", 0.1)], 1) == inf
    prompt = Request("r", "t", [1] * 9, 8, Sampling(), 1e9, None, False, slo_class="strict", tpot=0.1)
    assert spare_tokens(MODEL, [prompt], 1) == inf


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
    begin = engine.engine.hot.begin

    def counted(rows: list[Row], n_decode: int) -> None:
        strict = any(row.request.slo_class == "strict" for row in rows[:n_decode])
        chunks.append((strict, sum(row.length for row in rows[n_decode:])))
        begin(rows, n_decode)

    monkeypatch.setattr(engine.engine.hot, "begin", counted)
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
