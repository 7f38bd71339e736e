"""Random keys of the right form: few are looked up, and nobody with a key waits for that."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from threading import Event

import pytest
from running_gateway import Running, until

from adapters.keys import new_key
from adapters.local_store import LocalStore
from adapters.store import Object
from adapters.tenants import Tenants
from cluster.errors import ServiceError
from gateway.catalog.key_lookups import AT_ONCE, MAX_LOOKUPS_PER_S, KeyLookups


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is read of each object."""
    counts: Counter[str] = Counter()
    read = LocalStore.get

    def get(self: LocalStore, key: str) -> Object:
        counts[key] += 1
        return read(self, key)

    monkeypatch.setattr(LocalStore, "get", get)
    return counts


@contextmanager
def flood(running: Running) -> Iterator[list[int]]:
    """Calls with a new key each, of tenants that exist and don't and of administrators; yields the replies so far."""
    stop, statuses = Event(), list[int]()
    owners = cycle(["acme", "nobody", None, "other", "somebody"])

    def send() -> None:
        client = running.client(None)
        while not stop.is_set():
            reply = client.get("/functions", headers={"x-api-key": new_key(next(owners))[0]})
            assert reply.status_code == 401 or int(reply.headers["retry-after"]) >= 1
            statuses.append(reply.status_code)

    with ThreadPoolExecutor(16) as pool:
        senders = [pool.submit(send) for _ in range(16)]
        try:
            yield statuses
        finally:
            stop.set()
    for sender in senders:
        sender.result()


def test_random_keys_are_few_reads_and_delay_no_known_one(start: Callable[..., Running], reads: Counter[str]) -> None:
    running = start()
    reads.clear()
    began = time.monotonic()
    with flood(running) as statuses:
        until(lambda: statuses.count(429) > 50 and len(statuses) > 3 * MAX_LOOKUPS_PER_S)
        for owner in ("acme", "other", "admin"):  # the first call of each
            headers = {"x-garnish-tenant": "acme"} if owner == "admin" else {}
            assert running.client(owner, **headers).get("/functions").status_code == 200
    assert set(statuses) == {401, 429}
    seconds = time.monotonic() - began
    most = MAX_LOOKUPS_PER_S * (seconds + 1) + 2 * 3 * (seconds + 1)  # and what is known is renewed
    assert sum(count for key, count in reads.items() if key.endswith(("tenant.json", "admin.json"))) <= most


def test_a_new_key_is_found(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start()
    tenants = Tenants(LocalStore(tmp_path / "registry"))
    client = running.client(None)
    assert running.client("acme").get("/functions").status_code == 200
    tenants.put("late")
    for owner in ("acme", "late"):  # made by another gateway a moment ago
        key = tenants.add_key(owner)[0]
        assert client.get("/functions", headers={"x-api-key": key}).status_code == 200
    with flood(running) as statuses:
        until(lambda: 429 in statuses)
        key = tenants.add_key("late")[0]
        until(lambda: client.get("/functions", headers={"x-api-key": key}).status_code == 200)


def test_the_bucket_and_what_runs_at_once() -> None:
    now = 0.0
    lookups = KeyLookups(10, lambda: now)

    def count() -> int:
        done = 0
        while done < 100:
            try:
                with lookups.one():
                    done += 1
            except ServiceError:
                break
        return done

    assert [count(), count()] == [10, 0]
    now = 0.5
    assert count() == 5
    now = 100.0
    held = [lookups.one() for _ in range(AT_ONCE)]
    for one in held:
        one.__enter__()
    assert count() == 0
    held[0].__exit__(None, None, None)
    assert count() == 10 - AT_ONCE
