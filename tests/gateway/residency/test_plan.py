"""What each node is asked to have: bounds over drawn wishes, and who comes first."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct
from numbered_adapters import DIGESTS, adapter
from scheduling_world import node, table_of

from cluster.news import Resident
from cluster.residency import MAX_WANTED
from gateway.residency.plan import (
    DEVICE_CHANCE,
    TENANT_SHARE,
    TENANT_WANTED,
    WANTED_SHARE,
    Plan,
    PlannedAdapter,
    PrewarmTarget,
)

MEMORY = 1_000_000


def planned(nodes: list, wishes: list[PrewarmTarget]) -> dict[str, dict[str, PlannedAdapter]]:
    plan = Plan(table_of(*nodes), "b")
    for wish in wishes:
        plan.add(wish)
    return {name: {want.adapter.digest: want for want in wants} for name, wants in plan.wants().items()}


@pytest.mark.parametrize("seed", range(12))
def test_no_node_is_asked_for_more_than_it_may_be(seed: int) -> None:
    rng = random.Random(seed)
    nodes = [node(f"n{number}", adapter_bytes=MEMORY * rng.choice([1, 2]), host_bytes=MEMORY) for number in range(3)]
    wishes = [
        PrewarmTarget(
            f"t{rng.randrange(4)}/f{rng.randrange(90)}",
            adapter(number := rng.randrange(200), (500, 5000, 60_000)[number % 3]),
            cause,
            rng.uniform(0.1, 1.0) if cause == "forecast" else 1.0,
            copies=rng.randint(1, 3),
        )
        for cause in [*["order"] * 20, *["schedule"] * 40, *["forecast"] * 400]
    ]  # fmt: skip
    asked = planned(nodes, wishes)  # type: ignore[arg-type]
    for each in nodes:
        wants = asked[each.id].values()
        assert 0 < len(wants) <= MAX_WANTED
        for tier, memory in (("device", each.adapter_bytes), ("host", each.host_bytes)):
            assert sum(want.adapter.bytes for want in wants if want.tier == tier) <= WANTED_SHARE * memory
        order = [(not want.pinned, -want.steps, want.adapter.digest) for want in wants]
        assert order == sorted(order)
        for tenant in ("t0", "t1", "t2", "t3"):
            own = [
                want for want in wants
                if any(key.startswith(f"{tenant}/") and cause != "forecast" for key, cause in want.causes.items())
            ]  # fmt: skip
            assert len(own) <= TENANT_WANTED
            assert sum(want.adapter.bytes for want in own) <= TENANT_SHARE * each.adapter_bytes
    assert any(want.pinned for wants in asked.values() for want in wants.values())


def test_a_list_that_says_the_same_is_the_same() -> None:
    """In whatever order wishes come, and however their chances differ by less than is told: nothing is sent again."""
    rng = random.Random(3)
    wishes = [PrewarmTarget(f"t/f{number}", adapter(number), "forecast", 0.31) for number in range(20)]
    lists = []
    for _ in range(5):
        rng.shuffle(wishes)
        drawn = [replace(wish, chance=wish.chance + rng.uniform(-0.005, 0.005)) for wish in wishes]
        plan = Plan(table_of(node("n")), "b")
        for wish in drawn:
            plan.add(wish)
        lists.append([want.message() for want in plan.wants()["n"]])
    assert lists[0] and all(each == lists[0] for each in lists)


def test_what_is_ordered_and_scheduled_counts_once() -> None:
    ordered = [PrewarmTarget("t/f", adapter(number), "order", 1.0) for number in range(TENANT_WANTED // 2)]
    scheduled = [PrewarmTarget("t/f", adapter(number), "schedule", 1.0) for number in range(TENANT_WANTED + 1)]
    asked = planned([node("n")], [*ordered, *scheduled])["n"]
    assert set(asked) == {adapter(number).digest for number in range(TENANT_WANTED)}


def test_the_tier_follows_chance_and_where_it_is() -> None:
    nodes = [node("n", residents=[Resident(DIGESTS[0], "host", 1, 0), Resident(DIGESTS[1], "disk", 1, 0)])]
    low, high = DEVICE_CHANCE - 0.1, DEVICE_CHANCE + 0.1
    wishes = [PrewarmTarget("t/f", adapter(number), "forecast", low) for number in (0, 1, 2)]
    wishes += [
        PrewarmTarget("t/g", adapter(3), "forecast", high),
        PrewarmTarget("t/h", adapter(4), "order", 1.0, "host", node="n"),
    ]
    asked = planned(nodes, [*wishes, PrewarmTarget("t/i", adapter(5), "order", 1.0, node="away")])["n"]
    tiers = {digest: (want.tier, want.pinned) for digest, want in asked.items()}
    assert tiers == {
        DIGESTS[0]: ("device", False),
        DIGESTS[1]: ("host", False),
        DIGESTS[2]: ("host", False),
        DIGESTS[3]: ("device", False),
        DIGESTS[4]: ("host", True),
    }


def test_what_several_nodes_have_is_kept_on_each_and_what_none_has_comes_to_one() -> None:
    nodes = [node(f"n{number}") for number in range(6)]
    on_two = [Resident(DIGESTS[0], "device", 1, 0)]
    nodes[1], nodes[4] = node("n1", residents=on_two), node("n4", residents=on_two)
    asked = planned(nodes, [PrewarmTarget("t/f", adapter(number), "forecast", 0.9) for number in (0, 1)])
    assert [name for name, wants in asked.items() if DIGESTS[0] in wants] == ["n1", "n4"]
    assert len([name for name, wants in asked.items() if DIGESTS[1] in wants]) == 1
    spread = planned(nodes, [PrewarmTarget("t/f", adapter(1), "schedule", 1.0, copies=4)])
    assert sum(DIGESTS[1] in wants for wants in spread.values()) == 4, "distinct nodes"


def test_equal_adapters_of_two_functions_are_one_want_with_their_chances_together() -> None:
    wishes = [PrewarmTarget("t/f", adapter(0), "forecast", 0.5), PrewarmTarget("u/g", adapter(0), "forecast", 0.5)]
    (want,) = planned([node("n")], wishes)["n"].values()
    assert (want.chance, set(want.causes)) == (0.75, {"t/f", "u/g"})
    assert want.message().chance == 0.75


def test_a_copy_of_host_memory_is_wanted_on_the_device_by_its_forecast_alone() -> None:
    """On the device it is worth what is forecast, not what a copy there would be."""
    copies = [PrewarmTarget(f"t/f{number}", adapter(number), "provisioned", 1.0, "host") for number in range(3)]
    others = [PrewarmTarget("t/f0", adapter(0), "forecast", 0.6), PrewarmTarget("t/f1", adapter(1), "order", 1.0)]
    wants = planned([node("n")], [*copies, *others])["n"]
    told = [wants[digest].message() for digest in DIGESTS[:3]]
    assert [(each.provisioned, each.tier) for each in told] == [("host", "device")] * 2 + [("host", "host")]
    assert [each.chance for each in told[:2]] == [0.6, 1.0]
    device = planned([node("n")], [PrewarmTarget("t/f", adapter(0), "provisioned", 1.0)])["n"][DIGESTS[0]]
    assert (device.provisioned, device.message().chance) == ("device", 1.0)


def test_a_forecast_finds_host_memory_where_the_device_has_none_left() -> None:
    """The device takes three quarters of its bytes in likely ones; host memory takes others, up to its own share."""
    size = MEMORY // 4
    wishes = [
        PrewarmTarget(f"t/f{number}", adapter(number, size), "forecast", 0.9 - number / 50) for number in range(12)
    ]
    asked = planned([node("n", adapter_bytes=MEMORY, host_bytes=2 * MEMORY)], wishes)["n"]
    tiers = [asked[digest].tier if digest in asked else None for digest in DIGESTS[:12]]
    assert tiers == ["device"] * 3 + ["host"] * 6 + [None] * 3


def test_what_is_wanted_twice_has_the_better_tier_where_there_is_room() -> None:
    size = MEMORY // 2
    wishes = [
        PrewarmTarget("t/f", adapter(0, size), "forecast", 0.2),
        PrewarmTarget("t/g", adapter(0, size), "forecast", 0.9),
    ]
    wishes += [
        PrewarmTarget("t/h", adapter(1, size), "forecast", 0.2),
        PrewarmTarget("t/i", adapter(1, size), "forecast", 0.9),
    ]
    asked = planned([node("n", adapter_bytes=MEMORY, host_bytes=4 * MEMORY)], wishes)["n"]
    assert [asked[digest].tier for digest in DIGESTS[:2]] == ["device", "host"]


def test_room_is_counted_in_the_dtype_of_the_node() -> None:
    """Files in bfloat16 take twice their bytes on a node of float32; bytes of an unknown dtype count as they are."""
    adapters = [replace_struct(adapter(number, 1000), itemsize=2 if number < 6 else 0) for number in range(12)]
    for itemsize, most in ((4, 2), (2, 4), (0, 4)):
        plan = Plan(table_of(node("n", adapter_bytes=9000, adapter_itemsize=itemsize)), "b")
        for number, each in enumerate(adapters[:6]):
            plan.add(PrewarmTarget(f"t{number}/f", each, "provisioned", 1.0))
        assert len(plan.wants()["n"]) == most
        assert [len(found) for found in plan.left_out.values()] == [1] * (6 - most)
    wide = node("n", adapter_bytes=9000, adapter_itemsize=4)
    assert len(planned([wide], [PrewarmTarget("t/f", adapters[7], "order", 1.0)])["n"]) == 1
    assert not planned([wide], [PrewarmTarget("t/f", adapters[0], "order", 1.0)])["n"], "2000 is more than an eighth"


def test_what_is_left_out_is_told_with_its_reason() -> None:
    def reasons(wishes: list[PrewarmTarget], **told: Any) -> list[str]:
        plan = Plan(table_of(node("n", **told)), "b")
        for wish in wishes:
            plan.add(wish)
        return [each.why for found in plan.left_out.values() for each in found]

    large = PrewarmTarget("t/f", adapter(0, 60_000), "schedule", 1.0)
    assert "orders and schedules get 50000 of the device" in reasons([large], adapter_bytes=400_000)[0]
    assert "50000 of host memory" in reasons([replace(large, tier="host")], adapter_bytes=1, host_bytes=400_000)[0]
    assert reasons([large], adapter_bytes=MEMORY) == []
    assert reasons([large], adapter_bytes=MEMORY, takes_wants=False) == ["prefetch is off on this node"]
    forecast = PrewarmTarget("t/f", adapter(0), "forecast", 0.9)
    assert reasons([forecast], takes_wants=False) == []
    assert not planned([node("n", takes_wants=False)], [forecast])["n"]
    kept = PrewarmTarget("t/f", adapter(0), "provisioned", 1.0)
    assert len(planned([node("n", takes_wants=False)], [kept])["n"]) == 1
    many = [PrewarmTarget("t/f", adapter(number), "order", 1.0) for number in range(TENANT_WANTED + 2)]
    assert reasons(many) == [f"a tenant's orders and schedules may name {TENANT_WANTED} adapters there"] * 2
    half = [PrewarmTarget(f"t{number}/f", adapter(number, 60_000), "order", 1.0) for number in range(9)]
    assert reasons(half, adapter_bytes=600_000)[-1].startswith("other adapters that are wanted there")
    assert "1 of the device copies find no node" in reasons([replace(kept, copies=2)])[0]
