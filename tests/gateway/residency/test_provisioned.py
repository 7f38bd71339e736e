"""Provisioned copies: where they are kept, who comes first, what is refused, and what happens when a node goes."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from numbered_adapters import DIGESTS, adapter
from running_gateway import Running, until
from scheduling_world import node, table_of
from test_warm_schedules import Threads
from wanting_node import WantingNode, wanting_node

from adapters import standing as books
from adapters.choices import Choice, Resolved
from adapters.errors import CorruptFunction, NoSuchFunction
from adapters.functions import FunctionRecord, Policy, Provisioned, VersionEntry, with_version
from adapters.local_store import LocalStore
from adapters.standing import function_key, read_standing, settle
from cluster.news import Resident
from cluster.node_table import NodeTable
from cluster.residency import MAX_WANTED
from gateway.leader.tick import Tick
from gateway.residency import residency, standing
from gateway.residency.plan import PROVISIONED_SHARE, Plan, PlannedAdapter, PrewarmTarget
from gateway.residency.standing import StandingPolicies, memory_of

MEMORY = 1_000_000


def nodes_with(count: int, host_bytes: int = MEMORY, residents: dict[str, list[Resident]] | None = None) -> NodeTable:
    found = residents or {}
    table = table_of(*(node(f"n{n}", adapter_bytes=MEMORY, residents=found.get(f"n{n}", [])) for n in range(count)))
    for row in list(table.rows()):
        table.put(msgspec.structs.replace(table.record(row), host_bytes=host_bytes))
    return table


def planned(table: NodeTable, wishes: list[PrewarmTarget]) -> dict[str, list[PlannedAdapter]]:
    plan = Plan(table, "b")
    for wish in wishes:
        plan.add(wish)
    return {name: list(wants) for name, wants in plan.wants().items()}


def kept(wants: dict[str, list[PlannedAdapter]], number: int) -> list[tuple[str, str | None]]:
    """Nodes and tiers where the adapter is provisioned."""
    return [(name, w.provisioned) for name, each in wants.items() for w in each if w.adapter.digest == DIGESTS[number]]


def provisioned(number: int, device: int, host: int = 0, size: int = 1000) -> list[PrewarmTarget]:
    wish = adapter(number, size)
    return [PrewarmTarget(f"t/f{number}", wish, "provisioned", 1.0, tier, copies) for tier, copies in
            (("device", device), ("host", host)) if copies]  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_copies_are_on_nodes_of_their_own_within_what_may_be_kept(seed: int) -> None:
    """Drawn copies of drawn sizes, beside orders and forecasts; in the order of their importance."""
    rng = random.Random(seed)
    table = nodes_with(4, host_bytes=2 * MEMORY)
    wishes = [
        wish for number in range(40)
        for wish in provisioned(number, rng.randint(0, 3), rng.randint(0, 2), rng.choice([500, 5000, 60_000]))
    ]  # fmt: skip
    wishes.sort(key=lambda wish: wish.tier != "device")
    others = [PrewarmTarget("u/g", adapter(100 + n), "order", 1.0) for n in range(5)]
    others += [PrewarmTarget("u/h", adapter(rng.randrange(60)), "forecast", 0.9) for _ in range(50)]
    wants = planned(table, [*wishes, *others])
    rank = {(wish.adapter.digest, wish.tier): number for number, wish in enumerate(wishes)}
    left = dict[tuple[str, str], float]()
    for name, each in wants.items():
        assert len(each) <= MAX_WANTED
        for tier, memory in (("device", MEMORY), ("host", 2 * MEMORY)):
            sizes = [want.adapter.bytes for want in each if want.provisioned == tier]
            left[name, tier] = PROVISIONED_SHARE * memory - sum(sizes)
            assert left[name, tier] >= 0
        shown = [rank[want.adapter.digest, want.provisioned] for want in each if want.provisioned is not None]
        assert shown == sorted(shown), "the most important first"
        assert all(want.provisioned is None for want in each[len(shown) :])
    for wish in wishes:
        places = dict(kept(wants, int(wish.key.removeprefix("t/f"))))
        found = sum(tier == wish.tier for tier in places.values())
        assert found <= wish.copies
        without = [name for name in wants if places.get(name) is None]
        assert found == wish.copies or all(left[name, wish.tier] < wish.adapter.bytes for name in without)


def test_device_copies_and_host_copies_of_a_function_are_on_different_nodes() -> None:
    wants = planned(nodes_with(3), provisioned(0, device=1, host=2))
    assert sorted(tier or "" for _, tier in kept(wants, 0)) == ["device", "host", "host"]
    assert len({name for name, _ in kept(wants, 0)}) == 3
    few = planned(nodes_with(2), provisioned(0, device=1, host=2))
    assert sorted(tier or "" for _, tier in kept(few, 0)) == ["device", "host"], "as many as there are nodes"


def test_copies_stay_where_they_are_and_only_lost_ones_move() -> None:
    wishes = [wish for number in range(12) for wish in provisioned(number, device=2)]
    first = planned(nodes_with(4), wishes)
    held = {
        name: [Resident(w.adapter.digest, "device", w.adapter.bytes, 0) for w in each] for name, each in first.items()
    }
    assert planned(nodes_with(4, residents=held), wishes).keys() == first.keys()
    again = planned(nodes_with(5, residents=held), wishes)
    assert [sorted(kept(again, number)) for number in range(12)] == [
        sorted(kept(first, number)) for number in range(12)
    ]
    table = nodes_with(4, residents=held)
    table.remove("n1")
    left = planned(table, wishes)
    for number in range(12):
        before, after = set(kept(first, number)), set(kept(left, number))
        assert len(after) == 2
        assert {place for place in before if place[0] != "n1"} <= after


def test_a_full_node_sends_a_copy_to_the_next_one() -> None:
    big = [wish for number in range(4) for wish in provisioned(number, device=1, size=300_000)]
    wants = planned(nodes_with(4), big)
    assert sorted(len(each) for each in wants.values()) == [1, 1, 1, 1]
    assert sum(len(each) for each in planned(nodes_with(3), big).values()) == 3, "the least important has no room"


def test_what_may_be_provisioned_is_known_of_nodes_that_say_it() -> None:
    told = [msgspec.structs.replace(nodes_with(1, MEMORY).record(0), id=f"n{number}") for number in range(3)]
    memory = memory_of(told, "b")
    assert (memory.nodes, memory.device, memory.host) == (3, 3 * MEMORY / 2, 3 * MEMORY / 2)
    assert memory_of([], "b") == memory_of(told, "another") == books.Memory()
    assert memory_of([*told, msgspec.structs.replace(told[0], state="draining")], "b") == memory
    starting = msgspec.structs.replace(told[0], state="warming", base="", adapter_bytes=0, host_bytes=0)
    more = memory_of([*told, starting], "b")
    assert (more.nodes, more.device, more.host) == (4, None, None)


# --- the leader's look at policies


class Functions:
    """Stands for gateway.catalog.functions.Functions."""

    def __init__(self, policies: dict[str, Policy | Exception]) -> None:
        self.policies = policies

    async def choices(self, tenant: str, name: str, qualifier: str | None) -> list[Choice]:
        policy = self.policies.get(name, NoSuchFunction(tenant, name))
        if isinstance(policy, Exception):
            raise policy
        return [Choice(1.0, Resolved(name, 1, DIGESTS[len(name)], "key", (8,), 1000, policy, 2))]


class Looks:
    def __init__(self, folder: Path, policies: dict[str, Policy]) -> None:
        self.store, self.threads, self.functions = LocalStore(folder), Threads(), Functions(dict(policies))
        for number, (name, policy) in enumerate(policies.items()):
            record = FunctionRecord(name, 1.0, policy=policy)
            entry = VersionEntry(1, DIGESTS[len(name)], "b", (8,), (), 1000, float(number), 2)
            self.store.put(function_key("t", name), msgspec.json.encode(with_version(record, entry, "latest", 1.0)))
            settle(self.store, "t", name)
            time.sleep(0.002)  # by the store's clock, files have times
        self.policies = StandingPolicies(self.store, self.threads, self.functions)  # type: ignore[arg-type]

    def wanted(self) -> list[tuple[str, str, int]]:
        asyncio.run(self.policies.check(Tick(math.inf, lambda: 0.0, lambda: True)))
        assert all(wish.cause == "provisioned" for wish in self.policies.wishes)
        return [(wish.key, wish.tier, wish.copies) for wish in self.policies.wishes]


POLICIES = {
    "a": Policy(provisioned=Provisioned(device=1, host=2), slo_class="best_effort"),
    "bb": Policy(provisioned=Provisioned(device=2)),
    "ccc": Policy(provisioned=Provisioned(host=1), slo_class="strict"),
    "dddd": Policy(provisioned=Provisioned(device=1), slo_class="strict", idle_ttl=7.0),
    "eeeee": Policy(idle_ttl=9.0),
}


def test_classes_and_age_say_who_comes_first(tmp_path: Path) -> None:
    looks = Looks(tmp_path, POLICIES)
    assert looks.wanted() == [
        ("t/dddd", "device", 1), ("t/bb", "device", 2), ("t/a", "device", 1), ("t/ccc", "host", 1), ("t/a", "host", 2),
    ]  # fmt: skip
    assert looks.policies.idle_ttls == {DIGESTS[4]: 7.0, DIGESTS[5]: 9.0}


def test_what_is_away_damaged_or_gone_changes_no_other_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    looks = Looks(tmp_path, POLICIES)
    known = looks.wanted()
    looks.threads.away = True
    assert [looks.wanted() for _ in range(3)] == [known] * 3
    assert len(caplog.records) == 1
    looks.threads.away = False
    looks.functions.policies |= {"a": CorruptFunction("a"), "bb": Policy()}
    del looks.functions.policies["dddd"]
    assert looks.wanted() == [("t/ccc", "host", 1)]
    assert len(read_standing(looks.store).functions) == 5, "a policy may be about to be committed"
    monkeypatch.setattr(standing, "SETTLED_SECONDS", -60.0)
    settled = msgspec.structs.replace(POLICIES["ccc"], reserved_concurrency=2)
    looks.functions.policies["ccc"] = settled
    record = FunctionRecord("ccc", 1.0, policy=settled)
    looks.store.put(function_key("t", "ccc"), msgspec.json.encode(record))
    looks.wanted()
    assert read_standing(looks.store).functions["t/ccc"].reserved == 2, "a crash came between"
    for name in ("bb", "dddd"):
        looks.store.put(function_key("t", name), msgspec.json.encode(FunctionRecord(name, 1.0, deleted=True)))
    looks.wanted()
    assert set(read_standing(looks.store).functions) == {"t/a", "t/ccc", "t/eeeee"}


def test_functions_that_are_not_to_be_prefetched(tmp_path: Path) -> None:
    looks = Looks(tmp_path, {"a": Policy(prefetch="off"), "bb": Policy(idle_ttl=9.0), "ccc": Policy(prefetch="auto")})
    assert looks.wanted() == []
    assert looks.policies.not_prefetched == {"t/a"}
    looks.threads.away = True
    looks.wanted()
    assert looks.policies.not_prefetched == {"t/a"}
    looks.threads.away = False
    looks.functions.policies["a"] = Policy()
    looks.wanted()
    assert looks.policies.not_prefetched == frozenset()


# --- a gateway


@pytest.fixture
def running(start: Callable[..., Running], pirate: dict, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr(residency, "PLAN_SECONDS", 0.05)
    monkeypatch.setattr(residency, "NODES_SECONDS", 0.05)
    monkeypatch.setattr(standing, "LOOK_SECONDS", 0.05)
    running = start()
    assert running.client().post("/deploy/f", files=pirate).status_code == 201
    return running


def tier(node: WantingNode) -> str | None:
    """In which the node is to keep the only adapter."""
    wants = node.wanted[-1][1].adapters if node.wanted else []
    return wants[0].provisioned if wants else None


def places(client: httpx.Client) -> list[Any]:
    found = client.get("/functions/f/forecast").json()["wanted"]
    return sorted((place["tier"], place["cause"]) for place in found)


def test_a_node_that_goes_is_replaced_at_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [wanting_node(running, f"n{number}", adapter_bytes=1 << 24) for number in range(3)]
    client = running.client()
    assert client.patch("/functions/f", json={"provisioned": {"device": 1, "host": 1}}).status_code == 200
    until(lambda: sorted(str(tier(node)) for node in nodes) == ["None", "device", "host"])
    assert places(client) == [("device", "provisioned"), ("host", "provisioned")]
    monkeypatch.setattr(residency, "PLAN_SECONDS", 3600.0)
    time.sleep(0.2)  # the last plan of those that are made every 50 ms
    (lost,) = (node for node in nodes if tier(node) == "device")
    others = [node for node in nodes if node is not lost]
    lost.tell(state="draining")
    until(lambda: sorted(str(tier(node)) for node in others) == ["device", "host"])


def test_lost_copies_are_asked_for_in_the_order_of_their_importance(running: Running, pirate: dict) -> None:
    """Node by node, and what is left of them when one goes."""
    nodes = [wanting_node(running, f"n{number}", adapter_bytes=1 << 24) for number in range(2)]
    client, digests = running.client(), dict[str, str]()
    name, config = pirate["adapter_config.json"]
    for number, (function, policy) in enumerate({
        "late": {"provisioned": {"device": 1}},
        "spare": {"provisioned": {"device": 1}, "slo_class": "best_effort"},
        "early": {"provisioned": {"device": 1}, "slo_class": "standard"},
        "second": {"provisioned": {"host": 1}, "slo_class": "strict"},
        "first": {"provisioned": {"device": 1}, "slo_class": "strict"},
    }.items()):  # fmt: skip
        changed = json.dumps({**json.loads(config), "lora_alpha": 100 + number}).encode()
        reply = client.post(f"/deploy/{function}", files={**pirate, "adapter_config.json": (name, changed)})
        digests[function] = reply.json()["digest"]
        if function != "late":
            assert client.patch(f"/functions/{function}", json=policy).status_code == 200
            time.sleep(0.002)  # by the store's clock, files have times
    assert client.patch("/functions/late", json={"provisioned": {"device": 1}}).status_code == 200

    def told(node: WantingNode) -> list[str]:
        wants = node.wanted[-1][1].adapters if node.wanted else []
        assert all(want.provisioned is not None for want in wants)
        return [want.adapter.digest for want in wants]

    until(lambda: sorted([*told(nodes[0]), *told(nodes[1])]) == sorted(digests.values()))
    lost, other = sorted(nodes, key=lambda node: -len(told(node)))
    lost.tell(state="draining")
    order = [digests[function] for function in ("first", "early", "late", "spare", "second")]
    until(lambda: told(other) == order)


def test_policies_that_do_not_fit_are_refused_and_told(running: Running) -> None:
    client, size = running.client(), 0
    for number in range(2):
        wanting_node(running, f"n{number}", adapter_bytes=1 << 18)
    size = client.get("/functions/f").json()["versions"][0]["bytes"]
    more = client.patch("/functions/f", json={"provisioned": {"device": 2, "host": 1}})
    assert (more.status_code, more.json()["error"]["type"]) == (409, "conflict")
    assert "3 copies (2 device, 1 host) need as many nodes; 2 serve" in more.json()["error"]["message"]
    assert 2 * size > (1 << 18) / 2 > size, "as much as one tenant may have of both nodes"
    big = client.patch("/functions/f", json={"provisioned": {"device": 2}})
    assert big.status_code == 409
    assert f"{size} bytes x 2 device copies make {2 * size} bytes" in big.json()["error"]["message"]
    assert client.get("/functions/f").json()["policy"] == {}
    one = client.patch("/functions/f", json={"provisioned": {"device": 1}, "idle_ttl": 60})
    assert one.json()["policy"] == {"provisioned": {"device": 1}, "idle_ttl": 60}
    until(lambda: places(client) == [("device", "provisioned")])
    assert client.patch("/functions/f", json={"provisioned": None}).status_code == 200
    until(lambda: not places(client))


def test_nodes_are_told_the_idle_limits_of_what_they_hold(running: Running) -> None:
    node, client = wanting_node(running, "n"), running.client()
    digest = client.get("/functions/f").json()["versions"][0]["digest"]
    assert client.patch("/functions/f", json={"idle_ttl": 60}).status_code == 200
    node.hold(digest, "disk")
    time.sleep(0.2)
    assert not any(order.idle_ttls for _, order in node.wanted)
    node.hold(digest, "host")
    until(lambda: bool(node.wanted) and node.wanted[-1][1].idle_ttls == {digest: 60.0})
    assert client.patch("/functions/f", json={"idle_ttl": None}).status_code == 200
    until(lambda: node.wanted[-1][1].idle_ttls == {})
