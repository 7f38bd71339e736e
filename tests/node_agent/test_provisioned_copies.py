"""Provisioned copies beside floods of calls, and adapters that nobody calls any more."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from adapters.artifact import read_header
from cluster.messages import Adapter
from cluster.residency import WantedResidency
from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine import idle_limits
from node_agent.engine import prefetcher as prefetcher_module
from node_agent.engine.idle_limits import IdleLimits
from node_agent.engine.prefetcher import Prefetcher
from tests.node_agent.adapter_world import LAYERS, World, assert_contents, lease, loaded_lease
from tests.node_agent.prefetch_world import (
    MakePrefetcher,
    bring,
    call,
    full_adapters,
    here,
    poll_until,
    want,
    wanted,
    world_size,
)


@pytest.mark.usefixtures("by_layer")
def test_a_provisioned_copy_does_not_wait_for_the_loads_of_calls(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher()
    kept, called, likely = full_adapters(world)[:3]
    call(store, prefetcher, called)
    poll_until(store, prefetcher, lambda: stile.reads(called) > 0)
    prefetcher.want(wanted(want(kept, provisioned="device", pinned=True), want(likely)))
    stile.let(kept, LAYERS)
    stile.let(likely, LAYERS)
    poll_until(store, prefetcher, lambda: store.ready(kept.digest))
    assert here(store, called) == 0, "the call's load goes on"
    assert stile.reads(likely) == 0, "a forecast still steps back"
    store.retract(called.digest)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_no_flood_takes_a_provisioned_copy_away(world: World, make_prefetcher: MakePrefetcher, tier: str) -> None:
    """The others come and go in drawn order, through memory for half of them."""
    kept, *others = world.adapters
    sizes = world.store()
    held = [world_size(sizes, each) for each in world.adapters]
    sizes.close()
    store, prefetcher, stile = make_prefetcher(host_memory=held[0] + max(held[1:]), adapter_slots=2)
    stile.open_all()
    prefetcher.want(wanted(want(kept, tier=tier, provisioned=tier, pinned=True)))

    def is_here() -> bool:
        host = store.hosts.get(kept.digest)
        return store.ready(kept.digest) if tier == "device" else host is not None and host.complete

    poll_until(store, prefetcher, is_here)
    rng = random.Random(3)
    for other in rng.choices(others, k=12):
        found = loaded_lease(store, other)
        assert_contents(store, world, found)
        store.release(found, [])
        prefetcher.poll()
        assert is_here()
    evictions = (store.room if tier == "device" else store.hosts).eviction
    assert evictions.evictions > 0, "others do leave"
    prefetcher.want(wanted())
    for other in [*others, *others]:
        store.release(loaded_lease(store, other), [])
    assert not is_here(), "without the policy it leaves as any other"


def test_only_provisioned_copies_come_where_prefetch_is_off(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher(None)
    stile.open_all()
    kept, likely = full_adapters(world)[:2]
    prefetcher.want(wanted(want(likely, 1.0, pinned=True), want(kept, provisioned="device", pinned=True)))
    poll_until(store, prefetcher, lambda: store.ready(kept.digest))
    for _ in range(5):
        store.poll()
        prefetcher.poll()
    assert store.hosts.get(likely.digest) is None
    assert store.room.pinned == {kept.digest}
    prefetcher.clear()
    assert store.room.pinned == frozenset()


@pytest.mark.usefixtures("by_layer")
def test_what_was_forecast_and_is_now_provisioned_begins_anew(world: World, make_prefetcher: MakePrefetcher) -> None:
    """At the priority of a prefetch it would stand still behind the calls' loads for ever."""
    store, prefetcher, stile = make_prefetcher()
    kept, called = full_adapters(world)[:2]
    prefetcher.want(wanted(want(kept)))
    poll_until(store, prefetcher, lambda: stile.reads(kept) > 0)
    call(store, prefetcher, called)
    prefetcher.want(wanted(want(kept, provisioned="device", pinned=True)))
    stile.let(kept, 2 * LAYERS)
    poll_until(store, prefetcher, lambda: store.ready(kept.digest))
    assert here(store, called) == 0
    store.retract(called.digest)


@pytest.mark.usefixtures("by_layer")
def test_a_copy_of_host_memory_gets_on_the_device_as_any_forecast_does(
    world: World, make_prefetcher: MakePrefetcher
) -> None:
    """It comes to host memory beside a call's load, and steps back for that on its way to the device."""
    store, prefetcher, stile = make_prefetcher()
    kept, called = full_adapters(world)[:2]
    call(store, prefetcher, called)
    poll_until(store, prefetcher, lambda: stile.reads(called) > 0)
    prefetcher.want(wanted(want(kept, 0.6, tier="device", provisioned="host", pinned=True)))
    stile.let(kept, LAYERS)
    poll_until(store, prefetcher, lambda: here(store, kept) == LAYERS and not prefetcher.underway)
    for _ in range(20):
        store.poll()
        prefetcher.poll()
    assert here(store, called) == 0 and not store.on_device(kept.digest)
    stile.open_all()
    store.release(loaded_lease(store, called), [])
    store.retract(called.digest)
    poll_until(store, prefetcher, lambda: store.ready(kept.digest))


@pytest.mark.parametrize("chance", [0.3, 0.9])
def test_a_copy_of_host_memory_evicts_no_likelier_adapter_from_the_device(
    world: World, make_prefetcher: MakePrefetcher, chance: float
) -> None:
    store, prefetcher, stile = make_prefetcher(adapter_slots=1)
    stile.open_all()
    kept, likely = full_adapters(world)[:2]
    bring(store, likely)
    prefetcher.want(wanted(want(kept, chance, provisioned="host", pinned=True), want(likely, 0.4)))
    poll_until(store, prefetcher, lambda: ("device" in tiers_rested(prefetcher, kept)) or store.ready(kept.digest))
    assert store.ready(likely.digest) == (chance < 0.4)
    assert here(store, kept) == LAYERS


def test_where_prefetch_is_off_a_copy_of_host_memory_stays_there(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher(None)
    stile.open_all()
    kept = full_adapters(world)[0]
    prefetcher.want(wanted(want(kept, 1.0, provisioned="host", pinned=True)))
    poll_until(store, prefetcher, lambda: here(store, kept) == LAYERS and not prefetcher.underway)
    for _ in range(5):
        store.poll()
        prefetcher.poll()
    assert not store.on_device(kept.digest) and store.hosts.pinned == {kept.digest}


def tiers_rested(prefetcher: Prefetcher, adapter: Adapter) -> set[str]:
    return {tier for digest, tier in prefetcher._rests if digest == adapter.digest}


@pytest.mark.usefixtures("by_layer")
def test_the_most_important_copies_come_first(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher()
    copies = full_adapters(world)[:3]
    prefetcher.want(wanted(*(want(each, tier="host", provisioned="host", pinned=True) for each in copies)))
    poll_until(store, prefetcher, lambda: all(stile.reads(each) for each in copies[:2]))
    assert stile.reads(copies[2]) == 0, "two at once have the link"
    stile.let(copies[1], LAYERS)
    poll_until(store, prefetcher, lambda: stile.reads(copies[2]) > 0)
    assert here(store, copies[0]) == 0


def layers_of(world: World) -> dict[str, int]:
    """Returns how many layers of each adapter have bytes, by digest."""
    headers = {each.digest: read_header(world.objects, each.artifact) for each in world.adapters}
    return {digest: sum(bool(block.size) for block in header.layers) for digest, header in headers.items()}


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("seed", range(3))
def test_copies_have_the_link_two_at_a_time_until_the_last(
    world: World, make_prefetcher: MakePrefetcher, seed: int
) -> None:
    """However far each of them gets before another one does: never one alone while more wait, and never all at once."""
    store, prefetcher, stile = make_prefetcher()
    copies, layers = world.adapters, layers_of(world)
    prefetcher.want(wanted(*(want(each, tier="host", provisioned="host", pinned=True) for each in copies)))
    rng, begun = random.Random(seed), list[str]()
    left = dict(layers)

    def loading() -> list[Adapter]:
        return [
            each for each in copies if left[each.digest] and stile.reads(each) > layers[each.digest] - left[each.digest]
        ]

    def two_load() -> bool:
        assert len(loading()) <= 2, "not all at once"
        return len(loading()) == min(2, sum(map(bool, left.values())))

    def arrived() -> bool:
        return all(here(store, each) == layers[each.digest] - left[each.digest] for each in copies)

    while any(left.values()):
        poll_until(store, prefetcher, two_load)
        begun += [each.digest for each in loading() if each.digest not in begun]
        chosen = rng.choice(loading())
        count = rng.randint(1, left[chosen.digest])
        left[chosen.digest] -= count
        stile.let(chosen, count)
        poll_until(store, prefetcher, arrived)
    assert begun == [each.digest for each in copies], "the most important first"


def test_the_next_copy_does_not_wait_for_a_look(
    world: World, make_prefetcher: MakePrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small adapters come in far less time than passes between two looks: the link must not be idle for the rest."""
    store, prefetcher, stile = make_prefetcher()
    monkeypatch.setattr(prefetcher_module, "LOOK_INTERVAL_S", 3600.0)
    stile.open_all()
    copies, layers = world.adapters, layers_of(world)
    prefetcher.want(wanted(*(want(each, tier="host", provisioned="host", pinned=True) for each in copies)))
    poll_until(store, prefetcher, lambda: all(here(store, each) == layers[each.digest] for each in copies))


# --- idle limits


class Idle:
    """A store with limits by a clock of its own; `wanted`: digests that are to stay."""

    def __init__(self, store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.wanted = 1e9, set[str]()
        self.store = store
        self.limits = IdleLimits(store, lambda digest: digest in self.wanted, lambda: self.now)
        monkeypatch.setattr(store.demand, "last_call", lambda digest: self.called.get(digest, 0.0))
        self.called: dict[str, float] = {}

    def set(self, ttls: dict[str, float], seconds: float = 1e6) -> None:
        self.limits.set(WantedResidency([], seconds, ttls))

    def tiers(self, digest: str) -> tuple[bool, bool]:
        return digest in self.store.device, self.store.hosts.get(digest) is not None


@pytest.fixture
def idle(world: World, make_store: Any, monkeypatch: pytest.MonkeyPatch) -> Idle:
    monkeypatch.setattr(idle_limits, "MAX_ORDER_S", 1e9)
    store = make_store()
    bring(store, *full_adapters(world)[:2])
    return Idle(store, monkeypatch)


def test_an_idle_adapter_leaves_the_device_and_then_host_memory(world: World, idle: Idle) -> None:
    short, other = (each.digest for each in full_adapters(world)[:2])
    idle.called = {short: idle.now, other: idle.now}
    idle.set({short: 10.0})
    seen = []
    for seconds in (0.0, 9.0, 10.0, 19.0, 20.0):
        idle.now = 1e9 + seconds
        idle.limits.poll()
        seen.append(idle.tiers(short))
    assert seen == [(True, True), (True, True), (False, True), (False, True), (False, False)]
    assert idle.tiers(other) == (True, True), "nobody set it a limit"


def test_calls_leases_wants_and_the_end_of_an_order_keep_it(world: World, idle: Idle) -> None:
    digest = full_adapters(world)[0].digest

    def after(seconds: float) -> tuple[bool, bool]:
        idle.now += seconds
        idle.limits.poll()
        return idle.tiers(digest)

    idle.called = {digest: idle.now}
    idle.set({digest: 10.0})
    held = lease(idle.store, full_adapters(world)[0])
    assert after(100.0) == (True, True), "a request reads it"
    idle.store.release(held, [])
    assert after(9.0) == (True, True), "it was in use until just now"
    idle.wanted = {digest}
    assert after(100.0) == (True, True)
    idle.wanted = set()
    idle.set({digest: 10.0})  # as the gateway says again and again
    assert after(9.0) == (True, True)
    idle.called = {digest: idle.now}
    assert after(9.0) == (True, True), "it was called"
    idle.set({digest: 10.0}, seconds=0.5)
    assert after(100.0) == (True, True), "the order has ended"
    idle.set({digest: 10.0})
    assert after(1.0) == (False, False)


def test_a_missing_adapter_is_no_error() -> None:
    store = SimpleNamespace(device={}, hosts=SimpleNamespace(get=lambda _: None))
    limits = IdleLimits(store, lambda _: False, lambda: 5.0)  # type: ignore[arg-type]
    limits.set(WantedResidency([], 10.0, {"0" * 64: 1.0}))
    limits.poll()
