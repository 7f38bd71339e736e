"""What a leader remembers of calls: bounded, by version, and from nothing when it has not watched."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
from numbered_adapters import adapter

from cluster.forecast.chances import HORIZONS_S, Forecasts
from gateway.residency import arrivals, history
from gateway.residency.arrivals import Arrival, ArrivalCounter
from gateway.residency.history import GAP_SECONDS, MIN_CHANCE, NOTHING, CallHistory
from gateway.residency.messages import WATCH_SECONDS


class Given:
    """A forecaster that says what it is given, and keeps what it is told."""

    made = 0

    def __init__(self, chances: Mapping[str, float]) -> None:
        Given.made += 1
        self._chances = chances
        self.seen: list[tuple[float, dict[str, int]]] = []

    def observe(self, now: float, counts: Mapping[str, int]) -> None:
        self.seen.append((now, dict(counts)))

    def forecast(self, now: float) -> Forecasts:
        each = np.array(list(self._chances.values()))
        return Forecasts(list(self._chances), np.repeat(each[:, None], len(HORIZONS_S), 1))

    def error(self) -> dict[str, float]:
        return {"brier_within_30_s": 0.1}


def test_a_leader_says_nothing_before_it_has_watched_and_begins_anew_after_a_gap() -> None:
    now = 100.0

    async def main() -> None:
        nonlocal now
        made: list[Given] = []

        def make() -> Given:
            made.append(Given({"t/f": 0.9, "t/g": MIN_CHANCE / 2, "t/h": 0.5}))
            return made[-1]

        calls = CallHistory(make, lambda: now, lambda: 1e9 + now)
        calls.count([Arrival("t", "f", adapter(0), 3)])
        assert (calls.observes, calls.watched, calls.versions("t/f")) == (False, 0.0, None), "another one leads"
        for second in range(int(WATCH_SECONDS)):
            await calls.observe()
            assert await calls.forecast() == NOTHING
            calls.count([Arrival("t", "f", adapter(0), second)])
            now += 1.0
        found = await calls.forecast()
        assert [likely.key for likely in found.likely] == ["t/f", "t/h"]
        assert set(found.chances) == {"t/f", "t/g", "t/h"}
        assert [counts for _, counts in made[-1].seen[:3]] == [{}, {"t/f": 0}, {"t/f": 1}]
        assert [at for at, _ in made[-1].seen[:2]] == [1e9 + 100, 1e9 + 101]
        now += GAP_SECONDS
        before = len(made)
        assert await calls.forecast() == NOTHING
        await calls.observe()
        assert (len(made), calls.watched, calls.versions("t/f")) == (before + 1, 0.0, None)

    asyncio.run(main())


def test_shares_follow_the_calls_of_late_until_the_function_changes() -> None:
    async def main() -> None:
        calls = CallHistory(lambda: Given({}), lambda: 0.0, lambda: 0.0)
        await calls.observe()
        calls.count([Arrival("t", "f", adapter(0), 1) for _ in range(900)])
        calls.count([Arrival("t", "f", adapter(1), 1) for _ in range(300)])
        shares = {each.digest: share for each, share in calls.versions("t/f") or ()}
        assert shares[adapter(1).digest] > 0.99
        assert sum(shares.values()) == pytest.approx(1.0)
        calls.count([Arrival("t", "f", adapter(number), 1) for number in range(50)])
        assert len(calls.versions("t/f") or ()) <= history.MAX_VERSIONS
        calls.forget("t", "f")
        assert calls.versions("t/f") is None
        calls.learn("t/f", [(adapter(2), 1.0)])
        assert calls.versions("t/f") == [(adapter(2), 1.0)]
        calls.learn("t/gone", [])
        assert calls.versions("t/gone") == []

    asyncio.run(main())


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_FUNCTIONS", 50)
    monkeypatch.setattr(arrivals, "MAX_COUNTED", 70)

    async def main() -> None:
        counter, forecaster = ArrivalCounter(), Given({})
        calls = CallHistory(lambda: forecaster, lambda: 0.0, lambda: 0.0)
        await calls.observe()
        for number in range(100):
            counter.record("t", f"f{number}", adapter(number))
            counter.record("t", "f0", adapter(0))
        taken = counter.take()
        assert (len(taken), taken[0].calls, counter.take()) == (70, 101, [])
        calls.count(taken)
        known = sum(calls.versions(f"t/f{number}") is not None for number in range(100))
        await calls.observe()
        assert (known, len(forecaster.seen[-1][1])) == (50, 50)

    asyncio.run(main())
