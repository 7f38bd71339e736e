"""What chaos says of policies, with services that keep them and services that don't."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from adapters.local_store import LocalStore
from adapters.standing import STANDING_KEY, Entry, Standing
from benchmarks.faults.policies import (
    AWAY_S,
    COPIES,
    FUNCTIONS,
    IDLED,
    KEPT,
    STALE_S,
    TUNED,
    WRONG,
    ConcurrencyJudge,
    Policies,
    Writer,
)

CALLERS = 6


def simulated(rng: random.Random, *, extra: int = 0, seconds: float = 60.0) -> ConcurrencyJudge:
    """A service that lets in `extra` more than it may, by a clock of its own, and callers who are slow to read."""
    judge, changes, at = ConcurrencyJudge(), list[tuple[float, int]](), 0.0
    while at < seconds:
        value, begin = rng.randint(1, 3), at
        acknowledged = begin + rng.uniform(0, 0.2) if not changes or rng.random() < 0.8 else None
        takes_effect = begin + rng.uniform(0, STALE_S) if acknowledged else begin + rng.uniform(0, 1.0)
        if acknowledged or rng.random() < 0.5:
            changes.append((takes_effect if changes else 0.0, value))
        judge.record_limit(value, begin, acknowledged)
        at += rng.uniform(STALE_S + 0.5, 8.0)
    ends = list[float]()
    ready = [0.5] * CALLERS
    while min(ready) < seconds:
        caller = min(range(CALLERS), key=ready.__getitem__)
        sent = ready[caller]
        admitted = sent + rng.uniform(0, 0.01)  # callers come in the order of their clocks: so do admissions, nearly
        limit = [value for effect, value in changes if effect <= admitted][-1]
        if sum(end > admitted for end in ends) >= limit + extra:
            ready[caller] = sent + 0.05
            continue
        first, end = admitted + rng.uniform(0.01, 0.1), admitted + rng.uniform(0.2, 2.0)
        ends.append(end)
        judge.record_call(sent, first + rng.uniform(0, 0.3), end - sent - rng.uniform(0, 0.005))
        ready[caller] = end + rng.uniform(0, 0.2)
    return judge


@pytest.mark.parametrize("seed", range(20))
def test_a_service_that_keeps_its_limits_is_not_blamed(seed: int) -> None:
    assert simulated(random.Random(seed)).over([]) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_one_call_too_many_is_seen(seed: int) -> None:
    judge = simulated(random.Random(seed), extra=1)
    over, _ = judge.over([])
    assert over > 0
    assert judge.over([(0.0, 1000.0)])[0] == 0, "while Redis is away more may run"
    assert simulated(random.Random(seed), extra=4).over([(0.0, 1000.0)])[1] > 0, "but not any number"


def test_redis_is_in_order_again_a_while_after_its_harm() -> None:
    judge = ConcurrencyJudge()
    judge.record_limit(1, 0.0, 0.1)
    for at in (10.0, 10.2):
        judge.record_call(at, at + 0.1, 5.0)
    assert judge.over([]) == (1, 0)
    assert judge.over([(10.25, 11.0)]) == (0, 0)
    assert judge.over([(1.0, 10.1 - AWAY_S)]) == (1, 0)
    assert judge.over([(1.0, 10.3 - AWAY_S)]) == (0, 0)
    assert judge.over([(11.0, 12.0)]) == (1, 0), "it was harmed later"


def test_an_acknowledged_write_must_be_there_or_a_later_one() -> None:
    writer = Writer(TUNED, "max_age", number=1005, acknowledged=1003)
    values = [{"max_age": 1000.0 + number} for number in range(8)]
    assert [writer.is_kept(policy) for policy in values] == [False] * 3 + [True] * 3 + [False] * 2
    assert not writer.is_kept({})
    assert Writer(TUNED, "max_age", number=1005).is_kept({}), "none was acknowledged"


class Api:
    """A service in which all is as it should be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.policies: dict[str, dict[str, Any]] = {name: {} for name in FUNCTIONS}
        self.policies[IDLED] = {"idle_ttl": 3.0}
        self.entries = {"bench/idled": Entry(1.0, idle_ttl=3.0), "bench/kept": Entry(1.0, device=1, host=1)}
        self.tiers = {"n": {KEPT: "device", IDLED: "disk"}, "m": {KEPT: "host"}}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        match request.url.path.split("/")[1:]:
            case ["functions", name]:
                if request.method == "PATCH":
                    self.policies[name] = self.policies[name] | json.loads(request.content)
                return httpx.Response(200, json={"policy": self.policies[name], "versions": [{"digest": name}]})
            case ["nodes"]:
                return httpx.Response(200, json={"nodes": [{"record": {"id": node}} for node in self.tiers]})
            case ["nodes", node, "adapters"]:
                found = [{"digest": digest, "tier": tier} for digest, tier in self.tiers[node].items()]
                return httpx.Response(200, json={"adapters": found})
        return httpx.Response(404)

    @contextmanager
    def client(self) -> Iterator[httpx.Client]:
        with httpx.Client(base_url="http://gateway", transport=httpx.MockTransport(self)) as client:
            yield client

    def missing(self) -> dict[str, int]:
        store = LocalStore(self.folder / ".garnish" / "registry")
        store.put(STANDING_KEY, msgspec.json.encode(Standing(self.entries)))
        policies = Policies(SimpleNamespace(root=self.folder), 0, 40)  # type: ignore[arg-type]
        with self.client() as client:
            found = +policies._still_missing(client, client, deadline=0.0)
        assert set(found) <= set(WRONG)
        assert self.policies[KEPT]["provisioned"] == COPIES
        return dict(found)


def test_what_is_missing_in_the_end_is_found(tmp_path: Path) -> None:
    assert Api(tmp_path).missing() == {}
    api = Api(tmp_path)
    api.tiers["n"][KEPT] = "host"
    assert api.missing() == {"copies_missing": 1}
    api = Api(tmp_path)
    del api.tiers["m"]
    assert api.missing() == {"copies_missing": 1}
    api = Api(tmp_path)
    api.tiers["m"][IDLED] = "host"
    assert api.missing() == {"idle_kept": 1}
    api = Api(tmp_path)
    api.entries["bench/tuned"] = Entry(1.0, reserved=2)
    assert api.missing() == {"books_wrong": 1}
    api = Api(tmp_path)
    api.policies[TUNED] = {"reserved_concurrency": 1}
    assert api.missing() == {"books_wrong": 1}
    api = Api(tmp_path)
    api.entries["bench/kept"] = Entry(1.0, device=1)
    assert api.missing() == {"books_wrong": 1}
