"""What stands of policies while no call runs: sums that fit, sums that don't, and books that end up right."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from peft_files import variant

from adapters import standing
from adapters.deployment import AdapterUpload
from adapters.errors import AdapterError, Conflict, InvalidRequest, NotFound
from adapters.records import read_record
from adapters.registry import Registry
from adapters.standing import Memory, function_key, read_standing, settle
from adapters.tenants import MAX_RESERVED, Limits, Tenant, Tenants, tenant_key

FUNCTIONS = ("f", "g", "h")


@pytest.fixture
def filled(registry: Registry, good: tuple[bytes, Path]) -> Registry:
    """Three functions of one size, of a tenant that may have 10 generations at once."""
    Tenants(registry.store).put("acme", limits=Limits(concurrent=10))
    for name in FUNCTIONS:
        registry.deploy("acme", name, AdapterUpload(*good))
    return registry


def size(registry: Registry) -> int:
    return registry.function("acme", "f").versions[0].bytes


def books(registry: Registry) -> tuple[dict[str, Any], dict[str, int]]:
    """What both records say: copies and idle limits, and places."""
    entries = {
        key: (e.device, e.host, e.bytes, e.idle_ttl) for key, e in read_standing(registry.store).functions.items()
    }
    found = read_record(registry.store, tenant_key("acme"), Tenant)
    assert found is not None
    return entries, found[0].reserved


def copies(policy: dict[str, Any], tier: str) -> int:
    return int(policy.get("provisioned", {}).get(tier, 0))


def fits(name: str, before: dict[str, Any], after: dict[str, Any], each: int, memory: Memory) -> bool:
    """Only of what rises. `before` and `after`: all policies, by function."""
    old, new = before[name], after[name]
    more = new.get("reserved_concurrency", 0) > old.get("reserved_concurrency", 0)
    if more and sum(policy.get("reserved_concurrency", 0) for policy in after.values()) > 10:
        return False
    if not any(copies(new, tier) > copies(old, tier) for tier in ("device", "host")):
        return True
    sums = {tier: sum(copies(policy, tier) for policy in after.values()) for tier in ("device", "host")}
    assert memory.nodes and memory.copies and memory.device and memory.host
    if copies(new, "device") + copies(new, "host") > memory.nodes or sum(sums.values()) > memory.copies:
        return False
    rooms = {"device": memory.device * memory.tenant_share, "host": memory.host * memory.tenant_share}
    return all(sums[tier] * each <= rooms[tier] for tier in rooms if copies(new, tier))


def expected(policies: dict[str, Any], each: int) -> tuple[dict[str, Any], dict[str, int]]:
    entries = {
        f"acme/{name}": (copies(policy, "device"), copies(policy, "host"), each, policy.get("idle_ttl"))
        for name, policy in policies.items() if policy
    }  # fmt: skip
    return entries, {name: p["reserved_concurrency"] for name, p in policies.items() if "reserved_concurrency" in p}


@pytest.mark.parametrize("seed", range(4))
def test_sums_that_do_not_fit_are_refused_and_books_follow_the_policies(filled: Registry, seed: int) -> None:
    """Against plain sums over the policies themselves, for drawn changes."""
    rng, each = random.Random(seed), size(filled)
    memory = Memory(nodes=3, device=4.5 * each, host=3.5 * each, copies=7, tenant_share=rng.choice([1.0, 0.8]))
    policies: dict[str, Any] = {name: {} for name in FUNCTIONS}
    refused = 0
    for _ in range(25):
        name, field = (
            rng.choice(FUNCTIONS),
            rng.choice(["provisioned", "provisioned", "reserved_concurrency", "idle_ttl"]),
        )
        value = {
            "provisioned": {"device": rng.randint(1, 3), "host": rng.randint(1, 2)},
            "reserved_concurrency": rng.randint(1, 7),
            "idle_ttl": rng.choice([5.0, 60.0]),
        }[field]
        change = {field: rng.choice([value, value, None])}
        after = {n: dict(p) for n, p in policies.items()}
        after[name] = {k: v for k, v in (after[name] | change).items() if v is not None}
        may = fits(name, policies, after, each, memory)
        with nullcontext() if may else pytest.raises(Conflict):
            filled.changes.set_policy("acme", name, change, memory=memory)
        policies = after if may else policies
        refused += not may
        assert {n: msgspec.to_builtins(filled.function("acme", n).policy) for n in FUNCTIONS} == policies
        assert books(filled) == expected(policies, each)
    assert refused > 0


def test_a_refusal_says_the_sum(filled: Registry, good: tuple[bytes, Path]) -> None:
    each = size(filled)
    filled.changes.set_policy("acme", "f", {"provisioned": {"device": 2}})
    filled.changes.set_policy("acme", "f", {"reserved_concurrency": 8})
    for memory, told in [
        (Memory(device=2.5 * each), f"{each} bytes x 1 device copies make {3 * each} bytes"),
        (Memory(device=9.0 * each, tenant_share=0.25), f"{int(2.25 * each)} of the nodes' device memory"),
        (Memory(device=5.5 * each, itemsize=8), f"{2 * each} bytes x 1 device copies make {6 * each} bytes"),
        (Memory(nodes=0), "1 copies (1 device, 0 host) need as many nodes; 0 serve"),
        (Memory(copies=2), "3 copies in all"),
    ]:
        with pytest.raises(Conflict, match=re.escape(told)):
            filled.changes.set_policy("acme", "g", {"provisioned": {"device": 1}}, memory=memory)
    with pytest.raises(Conflict, match="11 in total, but the tenant may have 10"):
        filled.changes.set_policy("acme", "g", {"reserved_concurrency": 3})
    with pytest.raises(InvalidRequest, match="3 is more than max_concurrency, which is 2") as odd:
        filled.changes.set_policy("acme", "g", {"reserved_concurrency": 3, "max_concurrency": 2})
    assert odd.value.param == "reserved_concurrency"
    upload = AdapterUpload(*good, policy={"provisioned": {"device": 1}})
    with pytest.raises(Conflict, match="provisioned"):
        filled.deploy("acme", "new", upload, memory=Memory(nodes=0))
    with pytest.raises(NotFound):
        filled.function("acme", "new")
    assert books(filled) == ({"acme/f": (2, 0, each, None)}, {"f": 8})
    assert read_standing(filled.store).functions["acme/f"].reserved == 8


def test_a_tenant_s_limit_does_not_go_below_what_is_reserved(filled: Registry) -> None:
    tenants = Tenants(filled.store)
    filled.changes.set_policy("acme", "f", {"reserved_concurrency": 4})
    filled.changes.set_policy("acme", "g", {"reserved_concurrency": 3})
    with pytest.raises(Conflict, match="6, and the tenant's functions have 7 reserved in all"):
        tenants.replace("acme", Limits(concurrent=6))
    assert tenants.get("acme").limits == Limits(concurrent=10)
    tenants.replace("acme", Limits(concurrent=7, rps=5))
    tenants.replace("acme", Limits())
    with pytest.raises(Conflict, match="7 reserved in all"):
        tenants.replace("acme", Limits(concurrent=6))
    tenants.put("acme", limits=Limits(concurrent=2))  # as serverless.yml may say at a start
    tenants.replace("acme", Limits(concurrent=2), weight=2.0)
    tenants.replace("acme", Limits(concurrent=3))
    with pytest.raises(Conflict, match="2, and"):
        tenants.replace("acme", Limits(concurrent=2))


def test_a_deleted_function_gives_back_what_it_had(filled: Registry) -> None:
    filled.changes.set_policy("acme", "f", {"provisioned": {"host": 1}, "idle_ttl": 9, "reserved_concurrency": 4})
    assert books(filled)[1] == {"f": 4}
    filled.delete_function("acme", "f")
    assert books(filled) == ({}, {})


def test_idle_limits_are_those_of_versions_that_an_alias_names(filled: Registry, good: tuple[bytes, Path]) -> None:
    filled.changes.set_policy("acme", "f", {"idle_ttl": 9})
    first = filled.function("acme", "f").versions[0].digest
    filled.deploy("acme", "f", AdapterUpload(*variant(good, 3)))
    second = filled.function("acme", "f").versions[1].digest
    assert read_standing(filled.store).functions["acme/f"].digests == (second,)
    filled.changes.set_alias("acme", "f", "prod", {"1": 1.0})
    assert read_standing(filled.store).functions["acme/f"].digests == (first, second)


def test_functions_that_are_not_prefetched_are_listed(filled: Registry) -> None:
    filled.changes.set_policy("acme", "f", {"prefetch": "off"})
    filled.changes.set_policy("acme", "g", {"prefetch": "auto", "idle_ttl": 9})
    filled.changes.set_policy("acme", "h", {"prefetch": "auto"})
    entries = read_standing(filled.store).functions
    assert {key: entry.prefetch for key, entry in entries.items()} == {"acme/f": False, "acme/g": True}
    assert msgspec.to_builtins(filled.function("acme", "f").policy) == {"prefetch": "off"}
    filled.changes.set_policy("acme", "f", {"prefetch": None})
    assert set(read_standing(filled.store).functions) == {"acme/g"}
    with pytest.raises(InvalidRequest) as odd:
        filled.changes.set_policy("acme", "f", {"prefetch": "never"})
    assert odd.value.param == "prefetch"


def test_who_changes_policies_at_once_leaves_books_that_are_right(filled: Registry) -> None:
    rng = random.Random(1)
    changes = [
        (rng.choice(FUNCTIONS), {"provisioned": rng.choice([None, {"device": 1}]), "reserved_concurrency": places})
        for places in (None, 1, 2, 3) for _ in range(4)
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda change: filled.changes.set_policy("acme", *change), changes))
    policies = {name: msgspec.to_builtins(filled.function("acme", name).policy) for name in FUNCTIONS}
    assert books(filled) == expected(policies, size(filled))


def test_a_claim_whose_commit_failed_is_taken_back(filled: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    real = standing.update_marked

    def fails(store: Any, key: str, kind: Any, change: Any) -> Any:
        if key == function_key("acme", "f"):
            change(filled.function("acme", "f"))
            raise AdapterError("the store is away")
        return real(store, key, kind, change)

    monkeypatch.setattr(standing, "update_marked", fails)
    with pytest.raises(AdapterError, match="away"):
        filled.changes.set_policy("acme", "f", {"provisioned": {"device": 1}, "reserved_concurrency": 2})
    assert books(filled) == ({}, {})


def test_functions_with_reserved_places_are_few(filled: Registry) -> None:
    record = filled.function("acme", "f")
    Tenants(filled.store).put("acme", limits=Limits())
    key = tenant_key("acme")
    found = read_record(filled.store, key, Tenant)
    assert found is not None
    full = msgspec.structs.replace(found[0], reserved={f"x{number}": 1 for number in range(MAX_RESERVED)})
    filled.store.put(key, msgspec.json.encode(full))
    with pytest.raises(Conflict, match=f"{MAX_RESERVED} functions"):
        filled.changes.set_policy("acme", record.name, {"reserved_concurrency": 1})
    settle(filled.store, "acme", "x0")
    filled.changes.set_policy("acme", record.name, {"reserved_concurrency": 1})
