"""Deploys that are stopped, fail or end at the worst moment neither pass the tenant's limit nor keep its room."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft_files import changed

from adapters.base_model import BaseModel
from adapters.deployment import AdapterUpload
from adapters.errors import Conflict, StoreUnavailable
from adapters.quota import Quota
from adapters.quota_usage import HOLD_SECONDS
from adapters.registry import Registry
from adapters.store import ObjectStore
from adapters.tenants import Limits, Tenants

Adapters = list[tuple[bytes, Path]]


@pytest.fixture(scope="module")
def adapters(good: tuple[bytes, Path]) -> Adapters:
    """Adapters of one size with different contents: (config, weights)."""
    return [(changed(good[0], lora_alpha=8 + number), good[1]) for number in range(4)]


def held_by(store: ObjectStore) -> tuple[int, int]:
    """(adapters, open holds)"""
    held = Tenants(store).get("acme").held
    assert held is not None
    return held.adapters, len(held.holds)


def listed(store: ObjectStore, base: BaseModel) -> int:
    records, _ = Registry(store, base).functions("acme")
    return sum(len(record.versions) for record in records)


def around_listing(
    store: ObjectStore, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> ObjectStore:
    """A client of the same store which calls `before` and `after` its first write of a function's record."""
    client: Any = copy.copy(store)
    calls: list[str] = []

    def around(write: Callable[..., str]) -> Callable[..., str]:
        def call(key: str, *arguments: Any) -> str:
            first = key.endswith("/function.json") and not calls
            if first:
                calls.append(key)
                before()
            etag = write(key, *arguments)
            if first:
                after()
            return etag

        return call

    client.put_if_match, client.put_if_absent = around(client.put_if_match), around(client.put_if_absent)
    return client  # type: ignore[no-any-return]


def registry_of(store: ObjectStore, base: BaseModel, now: list[float]) -> Registry:
    registry = Registry(store, base)
    registry.quota = Quota(store, lambda: now[0])
    return registry


def during_storing(registry: Registry, then: Callable[[], object]) -> None:
    """Calls `then` once, when a deploy of the registry has reserved its room and is about to store its files."""
    put, calls = registry.contents.put_files, list[object]()

    def put_files(*arguments: Any) -> None:
        if not calls:
            calls.append(None)
            then()
        put(*arguments)

    registry.contents.put_files = put_files  # type: ignore[method-assign]


def test_a_version_is_counted_once_while_its_deploy_ends(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters
) -> None:
    """A count between the listing and the end of the deploy sees both the version and its hold."""
    store = new_store()
    Tenants(store).put("acme", limits=Limits(adapters=3))
    registry, other = Registry(store, base), Registry(store, base)
    registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    settle = registry.quota.settle

    def count_and_settle(tenant: str, hold: str, stored_bytes: int | None) -> None:
        assert other.quota._count("acme")
        other.deploy("acme", "h", AdapterUpload(*adapters[2]))  # the third: there is room
        with pytest.raises(Conflict):
            other.deploy("acme", "i", AdapterUpload(*adapters[3]))
        settle(tenant, hold, stored_bytes)

    registry.quota.settle = count_and_settle  # type: ignore[method-assign]
    registry.deploy("acme", "g", AdapterUpload(*adapters[1]))
    assert held_by(store) == (listed(store, base), 0) == (3, 0)


@pytest.mark.parametrize("exists", [False, True])
def test_a_deploy_that_was_stopped_before_it_lists_its_version(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters, exists: bool
) -> None:
    """Its room was given to another deploy meanwhile: it must not go on with its write."""
    store, now = new_store(), [1000.0]
    Tenants(store).put("acme", limits=Limits(adapters=1 + exists))
    other = registry_of(store, base, now)
    if exists:
        other.deploy("acme", "f", AdapterUpload(*adapters[0]))

    def stopped() -> None:
        with pytest.raises(Conflict):
            other.deploy("acme", "g", AdapterUpload(*adapters[2]))
        now[0] += HOLD_SECONDS + 1
        other.deploy("acme", "g", AdapterUpload(*adapters[2]))

    slow = registry_of(around_listing(store, before=stopped), base, now)
    with pytest.raises(Conflict, match="may have"):
        slow.deploy("acme", "f", AdapterUpload(*adapters[1]))
    assert held_by(store) == (listed(store, base), 0) == (1 + exists, 0)
    other.delete_function("acme", "g")
    slow.deploy("acme", "f", AdapterUpload(*adapters[1]))
    assert held_by(store) == (listed(store, base), 0) == (1 + exists, 0)


def test_a_count_that_died_half_way_is_ended_by_the_next(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters
) -> None:
    """It had marked the hold as ended, and no more: the room stays taken, for the version may be listed yet."""
    store, now = new_store(), [1000.0]
    Tenants(store).put("acme", limits=Limits(adapters=1))
    other = registry_of(store, base, now)

    def stopped() -> None:
        now[0] += HOLD_SECONDS + 1
        dying = registry_of(store, base, now)
        dying.quota._fence = _die  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            dying.deploy("acme", "g", AdapterUpload(*adapters[1]))
        assert held_by(store) == (0, 1)

    registry_of(around_listing(store, before=stopped), base, now).deploy("acme", "f", AdapterUpload(*adapters[0]))
    assert held_by(store) == (listed(store, base), 0) == (1, 0)
    with pytest.raises(Conflict):
        other.deploy("acme", "g", AdapterUpload(*adapters[1]))


@pytest.mark.parametrize("room", [False, True])
def test_a_slow_deploy_reserves_its_room_again(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters, room: bool
) -> None:
    store, now = new_store(), [1000.0]
    Tenants(store).put("acme", limits=Limits(adapters=1))
    slow, other = registry_of(store, base, now), registry_of(store, base, now)

    def pass_time() -> None:
        now[0] += HOLD_SECONDS + 1
        other.deploy("acme", "g", AdapterUpload(*adapters[1]))
        if room:
            other.delete_function("acme", "g")

    during_storing(slow, pass_time)
    if room:
        slow.deploy("acme", "f", AdapterUpload(*adapters[0]))
    else:
        with pytest.raises(Conflict, match="may have"):
            slow.deploy("acme", "f", AdapterUpload(*adapters[0]))
    assert held_by(store) == (listed(store, base), 0) == (1, 0)


def test_a_limit_that_is_set_during_a_deploy(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters
) -> None:
    store = new_store()
    Tenants(store).put("acme")
    slow, other = Registry(store, base), Registry(store, base)

    def limit() -> None:
        Tenants(store).replace("acme", Limits(adapters=1))
        other.deploy("acme", "g", AdapterUpload(*adapters[1]))

    during_storing(slow, limit)
    with pytest.raises(Conflict, match="may have"):
        slow.deploy("acme", "f", AdapterUpload(*adapters[0]))
    assert held_by(store) == (listed(store, base), 0) == (1, 0)


def test_a_deploy_that_fails_before_it_lists_its_version_gives_back_its_room(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters
) -> None:
    """At once: the store failed, but it is known that no version was listed."""
    store = new_store()
    Tenants(store).put("acme", limits=Limits(adapters=1))
    registry = Registry(store, base)
    during_storing(registry, _die)
    with pytest.raises(StoreUnavailable):
        registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    assert held_by(store) == (0, 0)
    registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    assert held_by(store) == (1, 0)


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), KeyboardInterrupt(), MemoryError()])
def test_a_deploy_that_ends_without_knowing_of_its_version(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters, error: BaseException
) -> None:
    """Its version is listed: it takes room, and takes it once."""
    store, now = new_store(), [1000.0]
    Tenants(store).put("acme", limits=Limits(adapters=2))

    def fail() -> None:
        raise error

    registry, other = registry_of(around_listing(store, after=fail), base, now), registry_of(store, base, now)
    with pytest.raises(type(error)):
        registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    assert other.quota._count("acme") and held_by(store) == (0, 1)
    other.deploy("acme", "g", AdapterUpload(*adapters[1]))
    for _ in range(2):
        with pytest.raises(Conflict):
            other.deploy("acme", "h", AdapterUpload(*adapters[2]))
        now[0] += HOLD_SECONDS + 1
    assert held_by(store) == (listed(store, base), 0) == (2, 0)


def test_a_version_that_is_removed_before_its_deploy_ends(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: Adapters
) -> None:
    """What is given back is not counted yet: the bound is too high, and the next refusal finds it out."""
    store = new_store()
    Tenants(store).put("acme", limits=Limits(adapters=1))
    registry, other = Registry(store, base), Registry(store, base)
    settle = registry.quota.settle

    def remove_and_settle(tenant: str, hold: str, stored_bytes: int | None) -> None:
        other.delete_function("acme", "f")
        settle(tenant, hold, stored_bytes)

    registry.quota.settle = remove_and_settle  # type: ignore[method-assign]
    registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    assert listed(store, base) == 0
    other.deploy("acme", "g", AdapterUpload(*adapters[1]))
    assert held_by(store) == (listed(store, base), 0) == (1, 0)


def _die(*_: object) -> None:
    raise StoreUnavailable("no answer")
