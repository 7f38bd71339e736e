"""How many tokens a second a node says that it computes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.performance_model import DecodeModel
from node_agent.performance import capacity
from node_agent.performance.capacity import CONTEXT, tokens_per_second
from tests.support.local_engine import MakeEngine


def test_dummy_requests_leave_nothing_behind(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "SLOW_STEP_S", 60.0)  # the host of a test may be busy
    engine = make_engine().engine
    begin = time.monotonic()
    told = tokens_per_second(engine)
    assert time.monotonic() - begin < 60
    assert list(told) == ["1", "8"]
    assert all(rate > 0 for rate in told.values())
    assert not engine.busy and not engine.take_events() and engine.blocks.free == engine.blocks.total


def test_more_callers_than_rows_are_left_out(make_engine: MakeEngine) -> None:
    assert list(tokens_per_second(make_engine(max_rows=2).engine)) == ["1"]


def test_a_model_is_asked_instead(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = make_engine().engine
    monkeypatch.setattr(engine, "drift", None)  # put back before the engine is looked at again
    model = DecodeModel(base=0.01, per_row=0.001, per_context=1e-6, per_rank=0.0, rank_term="max_rank", flat_rows=2)
    engine.drift = SimpleNamespace(measured=SimpleNamespace(decode=model))
    eight = 8 / (0.01 + 6 * 0.001 + 8 * CONTEXT * 1e-6)
    assert tokens_per_second(engine) == pytest.approx({"1": 1 / (0.01 + CONTEXT * 1e-6), "8": eight})


def test_a_slow_host_is_not_kept_waiting(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "SLOW_STEP_S", 0.0)
    assert list(tokens_per_second(make_engine().engine)) == ["1"]
