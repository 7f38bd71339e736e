"""What /readyz says of a registry that can't be written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from running_gateway import Running, until

from adapters.epoch import EPOCH_KEY
from adapters.local_store import LocalStore
from adapters.store import Object, ObjectInfo
from gateway.catalog import store_probe
from gateway.catalog.store_probe import READ_KEY, STORE_FULL, WRITE_KEY


@pytest.fixture
def running(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr(store_probe, "MIN_WRITE_GAP_S", 0.2)
    found = start()
    found.node()
    return found


def test_a_full_registry_shows_and_calls_are_served(
    running: Running, pirate: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = running.client()
    assert client.post("/deploy/f", files=pirate).status_code == 201
    assert client.get("/readyz").json()["checks"]["store"] == {"ok": True, "problem": None}
    written = LocalStore._written

    def full(self: LocalStore, data: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "_written", full)
    until(lambda: client.get("/readyz").json()["checks"]["store"]["problem"] == STORE_FULL)
    assert client.get("/readyz").status_code == 200
    assert client.post("/invoke/f", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    monkeypatch.setattr(LocalStore, "_written", written)
    until(lambda: client.get("/readyz").json()["checks"]["store"]["problem"] is None)


def test_writes_are_rare_and_leave_one_object(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []
    put = LocalStore.put

    def counted(self: LocalStore, key: str, data: bytes) -> str:
        writes.append(key)
        return put(self, key, data)

    monkeypatch.setattr(LocalStore, "put", counted)
    running = start()
    running.node()
    client = running.client(None)
    for _ in range(100):
        assert client.get("/readyz").status_code == 200
    assert 1 <= writes.count(WRITE_KEY) <= 3


def test_the_epoch_answers_for_the_registry(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is read, nothing else is read for those who ask whether the registry answers."""
    read: list[str] = []
    get, head = LocalStore.get, LocalStore.head

    def counted_get(self: LocalStore, key: str) -> Object:
        read.append(key)
        return get(self, key)

    def counted_head(self: LocalStore, key: str) -> ObjectInfo | None:
        read.append(key)
        return head(self, key)

    monkeypatch.setattr(LocalStore, "get", counted_get)
    monkeypatch.setattr(LocalStore, "head", counted_head)
    running = start(cache_seconds=2.0)
    running.node()
    client = running.client(None)
    read.clear()

    def is_read_again() -> bool:
        assert client.get("/readyz").status_code == 200
        return read.count(EPOCH_KEY) >= 3

    until(is_read_again)
    assert read.count(READ_KEY) <= 2  # the first answer, and one after a reading that was late
