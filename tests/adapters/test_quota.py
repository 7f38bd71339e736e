"""Limits on adapters and bytes: never passed, in races neither, and never held up by what has died."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peft_files import changed

from adapters.base_model import BaseModel
from adapters.deployment import AdapterUpload
from adapters.errors import Conflict, NotFound, StoreUnavailable
from adapters.functions import FunctionRecord
from adapters.quota import Quota
from adapters.quota_usage import HOLD_SECONDS, RECOUNT_SECONDS
from adapters.registry import Registry
from adapters.store import ObjectStore
from adapters.tenant_removal import delete_tenant
from adapters.tenants import Limits, Tenants


@pytest.fixture(scope="module")
def adapters(good: tuple[bytes, Path]) -> list[tuple[bytes, Path]]:
    """Adapters of one size with different contents: (config, weights)."""
    return [(changed(good[0], lora_alpha=8 + number), good[1]) for number in range(8)]


def held_by(store: ObjectStore, tenant: str = "acme") -> tuple[int, int, int]:
    held = Tenants(store).get(tenant).held
    assert held is not None
    return held.adapters, held.bytes, len(held.holds)


@pytest.mark.parametrize("which", ["adapters", "bytes"])
def test_a_limit_is_kept_and_room_comes_back(
    store: ObjectStore, base: BaseModel, adapters: list[tuple[bytes, Path]], which: str
) -> None:
    registry, tenants = Registry(store, base), Tenants(store)
    tenants.put("acme")
    size = registry.deploy("acme", "before", AdapterUpload(*adapters[0])).bytes
    limit = {"adapters": 3} if which == "adapters" else {"bytes": 3 * size + size // 2}
    tenants.replace("acme", Limits(**limit))
    registry.deploy("acme", "f", AdapterUpload(*adapters[1]))
    registry.deploy("acme", "f", AdapterUpload(*adapters[2]))
    for name in ("f", "g"):
        with pytest.raises(Conflict, match="may have"):
            registry.deploy("acme", name, AdapterUpload(*adapters[3]))
    assert len(store.list("artifacts/")) == 3, "what is refused stores nothing"
    assert registry.deploy("acme", "f", AdapterUpload(*adapters[1])).created is False  # nothing new
    assert held_by(store) == (3, 3 * size, 0)
    registry.delete_function("acme", "f")
    registry.deploy("acme", "g", AdapterUpload(*adapters[3]))
    registry.deploy("acme", "g", AdapterUpload(*adapters[4]))
    with pytest.raises(Conflict):
        registry.deploy("acme", "g", AdapterUpload(*adapters[5]))
    tenants.put("other")
    registry.deploy("other", "g", AdapterUpload(*adapters[5]))
    tenants.replace("acme", Limits())
    registry.deploy("acme", "g", AdapterUpload(*adapters[5]))
    assert tenants.get("acme").held is None


def test_racing_deploys_never_pass_the_limit(
    new_store: Callable[[], ObjectStore], base: BaseModel, adapters: list[tuple[bytes, Path]]
) -> None:
    store = new_store()
    Tenants(store).put("acme", limits=Limits(adapters=3))

    def deploy(number: int) -> bool:
        try:
            Registry(store, base).deploy("acme", f"f{number % 5}", AdapterUpload(*adapters[number]))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(deploy, range(8)))
    assert sum(done) == 3
    records, _ = Registry(store, base).functions("acme")
    assert sum(len(record.versions) for record in records) == 3
    assert held_by(store)[::2] == (3, 0)


def test_what_died_holds_nothing_for_ever(store: ObjectStore, base: BaseModel, adapters: Any) -> None:
    Tenants(store).put("acme", limits=Limits(adapters=1))
    now = [1000.0]
    quota = Quota(store, lambda: now[0])

    def die() -> None:
        with quota.deploying("acme", "f") as room:
            room.take(10)
            room.may_be_listed = True
            raise StoreUnavailable("nobody knows whether the version is listed")

    with pytest.raises(StoreUnavailable):
        die()
    with pytest.raises(Conflict):
        quota.take("acme", "f", 10)
    now[0] += HOLD_SECONDS + 1
    assert quota.take("acme", "f", 10) is not None


def test_a_bound_that_is_too_high_is_found_out(store: ObjectStore, base: BaseModel, adapters: Any) -> None:
    Tenants(store).put("acme", limits=Limits(adapters=1))
    now = [1000.0]
    registry = Registry(store, base)
    registry.quota = Quota(store, lambda: now[0])
    registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    # A gateway that was killed between the removal and giving back its room.
    key = "tenants/acme/functions/f/function.json"
    gone = msgspec.json.decode(store.get(key).data, type=FunctionRecord)
    store.put(key, msgspec.json.encode(msgspec.structs.replace(gone, deleted=True, versions=(), aliases={})))
    with pytest.raises(Conflict):
        registry.deploy("acme", "g", AdapterUpload(*adapters[1]))
    now[0] += RECOUNT_SECONDS + 1
    registry.deploy("acme", "g", AdapterUpload(*adapters[1]))


def test_a_count_in_the_midst_of_a_removal(store: ObjectStore, base: BaseModel, adapters: Any) -> None:
    """It has seen that the version is gone: giving its room back once more would be one too many."""
    Tenants(store).put("acme", limits=Limits(adapters=2))
    registry, quota = Registry(store, base), Quota(store)
    size = registry.deploy("acme", "f", AdapterUpload(*adapters[0])).bytes
    registry.deploy("acme", "g", AdapterUpload(*adapters[1]))
    key = "tenants/acme/functions/g/function.json"
    gone = msgspec.json.decode(store.get(key).data, type=FunctionRecord)
    with quota.removing("acme") as freed:
        store.put(key, msgspec.json.encode(msgspec.structs.replace(gone, deleted=True, versions=(), aliases={})))
        freed.set(1, size)
        assert Quota(store)._count("acme")
    assert held_by(store) == (1, size, 0)


def test_deploys_do_not_read_the_other_functions(store: ObjectStore, base: BaseModel, adapters: Any) -> None:
    """However many there are: only the first deploy under a new limit counts them."""
    Tenants(store).put("acme", limits=Limits(adapters=100))
    registry = Registry(store, base)
    registry.deploy("acme", "f0", AdapterUpload(*adapters[0]))
    read: list[str] = []
    get = store.get
    store.get = lambda key: read.append(key) or get(key)  # type: ignore[method-assign, func-returns-value]
    registry.deploy("acme", "f1", AdapterUpload(*adapters[1]))
    registry.delete_function("acme", "f1")
    assert not [key for key in read if "/f0/" in key]


def test_deploys_into_a_deleted_tenant(store: ObjectStore, base: BaseModel, adapters: Any) -> None:
    tenants, registry = Tenants(store), Registry(store, base)
    tenants.put("acme", limits=Limits(adapters=5))
    key, _ = tenants.add_key("acme")
    registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    delete_tenant(tenants, registry, "acme")
    assert tenants.verify(key) is None
    assert not tenants.list()
    for call in (tenants.get, tenants.add_key, tenants.delete):
        with pytest.raises(NotFound):
            call("acme")
    with pytest.raises(NotFound):
        registry.deploy("acme", "f", AdapterUpload(*adapters[1]))
    tenant, created = tenants.replace("acme", Limits())
    assert (created, tenant.keys, tenant.limits) == (True, (), Limits())
    assert tenants.verify(key) is None
    assert registry.functions("acme") == ([], None)
    assert registry.deploy("acme", "f", AdapterUpload(*adapters[0])).version == 2  # numbers are never used twice


def test_a_deploy_that_a_deletion_of_its_tenant_missed_leaves_nothing(
    store: ObjectStore, base: BaseModel, adapters: Any
) -> None:
    tenants, registry = Tenants(store), Registry(store, base)
    tenants.put("acme")
    put = registry.contents.put_files

    def put_files(*arguments: Any) -> None:
        delete_tenant(tenants, registry, "acme")
        put(*arguments)

    registry.contents.put_files = put_files  # type: ignore[method-assign]
    with pytest.raises(NotFound):
        registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    tenants.replace("acme", Limits())
    assert registry.functions("acme") == ([], None)


def test_a_deletion_that_died_is_ended_by_the_next(store: ObjectStore, base: BaseModel, adapters: Any) -> None:
    tenants, registry = Tenants(store), Registry(store, base)
    tenants.put("acme")
    registry.deploy("acme", "f", AdapterUpload(*adapters[0]))
    tenants.delete("acme")
    with pytest.raises(Conflict, match="deletion"):
        tenants.replace("acme", Limits())
    delete_tenant(tenants, registry, "acme")
    assert registry.functions("acme") == ([], None)
    with pytest.raises(NotFound):
        delete_tenant(tenants, registry, "acme")
    assert tenants.replace("acme", Limits())[1]


def test_what_serverless_yml_declares_stays(store: ObjectStore) -> None:
    tenants = Tenants(store)
    tenants.put("acme", declared=True, limits=Limits(adapters=5))
    with pytest.raises(Conflict, match=r"serverless\.yml"):
        tenants.replace("acme", Limits())
    with pytest.raises(Conflict, match=r"serverless\.yml"):
        tenants.delete("acme")
    text, record = tenants.add_key("acme")
    tenants.revoke_key("acme", record.key_id)
    assert tenants.verify(text) is None
    assert tenants.get("acme").limits.adapters == 5
