"""Predicted prefetches: when they begin and end, what they may evict, and how they are judged."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from cluster.messages import Adapter
from node_agent.engine import prefetcher as module
from node_agent.engine.adapter_tiers import is_staged
from tests.node_agent.adapter_world import LAYERS, World, lease, until
from tests.node_agent.prefetch_world import (
    MakePrefetcher,
    begin_predicted_copy,
    bring,
    call,
    full_adapters,
    here,
    poll_until,
    sums,
    want,
    wanted,
    world_size,
)


@pytest.mark.parametrize(
    ("chances", "called", "pinned", "gone"),
    [
        ((None, None, None), (), False, 0),  # the least recently used
        ((None, None, None), (0,), False, 1),
        ((None, None, None), (0, 1, 2), False, None),
        ((None, None, None), (0, 1, 2), True, None),  # their calls make them as good as certain
        ((0.5, 0.4, None), (2,), False, 1),  # 0.5 is more than half of 0.9
        ((0.5, None, 0.4), (1,), False, 2),
        ((0.5, 0.5, 0.5), (), False, None),
        ((0.5, 0.5, 0.5), (), True, 0),  # pinned is as good as certain
        ((0.6, 0.6, 0.6), (), True, None),
    ],
)
def test_what_may_be_evicted_for_a_prefetch(
    world: World,
    make_prefetcher: MakePrefetcher,
    chances: tuple[float | None, ...],
    called: tuple[int, ...],
    pinned: bool,
    gone: int | None,
) -> None:
    """Three slots are full; `chances` of the adapters there, which of them were called often, and which one goes."""
    store, prefetcher, stile = make_prefetcher(adapter_memory=2 << 20, eviction="lru")
    stile.open_all()
    there, wished = world.adapters[:3], world.adapters[3]
    bring(store, *there)
    for index in called * 100:
        store.demand.record_call(there[index].digest, time.monotonic())
    known = [want(a, chance) for a, chance in zip(there, chances, strict=True) if chance is not None]
    prefetcher.want(wanted(want(wished, pinned=pinned), *known))
    poll_until(store, prefetcher, lambda: here(store, wished) > 0 and not prefetcher.underway)
    left = [index for index, adapter in enumerate(there) if store.on_device(adapter.digest)]
    assert left == [index for index in range(3) if index != gone]
    assert store.ready(wished.digest) == (gone is not None)


def test_an_adapter_that_a_request_waits_for_is_not_evicted(world: World, make_prefetcher: MakePrefetcher) -> None:
    """It lies idle on the device while its request waits for a place in the batch."""
    store, prefetcher, stile = make_prefetcher(adapter_slots=1)
    stile.open_all()
    there, wished = world.adapters[:2]
    bring(store, there)
    store.announce(there)
    prefetcher.want(wanted(want(wished)))
    poll_until(store, prefetcher, lambda: here(store, wished) > 0 and not prefetcher.underway)
    assert store.ready(there.digest)
    store.retract(there.digest)


def test_host_memory_of_likelier_adapters_is_spared(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher()
    stile.open_all()
    there, wished = full_adapters(world)[:2]
    bring(store, there)
    store.discard(there.digest)
    store.hosts.memory = max(store.hosts.used, world_size(store, wished))
    prefetcher.want(wanted(want(there, 0.6, tier="host"), want(wished, 0.9, tier="host")))
    prefetcher.poll()
    host = store.hosts.get(wished.digest)
    assert host is not None
    while host.layout is None:  # it is known before the next poll
        time.sleep(0.001)
    for _ in range(20):
        store.poll()
        prefetcher.poll()
    assert here(store, there) == LAYERS and not here(store, wished)
    assert prefetcher.underway == 0, "it keeps no other from being brought in"
    prefetcher._rests.clear()
    prefetcher.want(wanted(want(wished, 0.9, tier="host")))
    poll_until(store, prefetcher, lambda: here(store, wished) == LAYERS and not prefetcher.underway)
    assert store.hosts.get(there.digest) is None
    assert not store.device, "host memory was asked for"


def test_an_unfit_or_broken_adapter_is_left_alone_for_a_while(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher()
    gone = Adapter("0" * 64, "artifacts/v1/none/none", 1, (1,))
    store.hosts.memory = 1
    prefetcher.want(wanted(want(gone), want(world.adapters[0])))
    poll_until(store, prefetcher, lambda: len({digest for digest, _ in prefetcher._rests}) == 2)
    assert (prefetcher.underway, stile.begun, sums(prefetcher)) == (0, [], (0, 0, 0))
    for _ in range(5):
        prefetcher.poll()
    assert prefetcher.underway == 0


@pytest.mark.parametrize("early", [False, True])
def test_what_was_brought_to_host_memory_goes_on_at_once_when_it_is_wanted_on_the_device(
    world: World, make_prefetcher: MakePrefetcher, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """Also where that is said while its bytes come. It rests only where the device has no room for it."""
    monkeypatch.setattr(module, "FULL_REST_S", 3600.0)
    store, prefetcher, stile = make_prefetcher()
    adapter = full_adapters(world)[0]
    prefetcher.want(wanted(want(adapter, 0.3, tier="host")))
    if early:
        poll_until(store, prefetcher, lambda: stile.reads(adapter) > 0)
        prefetcher.want(wanted(want(adapter, 0.6)))
    stile.open_all()
    poll_until(store, prefetcher, lambda: here(store, adapter) == LAYERS and not prefetcher.underway)
    if not early:
        assert not store.on_device(adapter.digest)
        prefetcher.want(wanted(want(adapter, 0.3)))
    poll_until(store, prefetcher, lambda: store.ready(adapter.digest))


def test_bytes_of_a_staged_adapter_are_late_until_they_are_on_the_device(
    world: World, make_prefetcher: MakePrefetcher
) -> None:
    """Of each that lies in host memory: nothing, then all of it has come when it is called."""
    store, prefetcher, stile = make_prefetcher(adapter_memory=4 << 20, adapter_slots=6)
    stile.open_all()
    for adapter in world.adapters:
        prefetcher.want(wanted(want(adapter, tier="host")))
        poll_until(store, prefetcher, lambda: is_staged(store, adapter.digest) and not prefetcher.underway)  # noqa: B023
        prefetcher._prefetched.clear()
        before = sums(prefetcher)
        link = begin_predicted_copy(store, prefetcher, stile, adapter)
        call(store, prefetcher, adapter)
        assert [now - then for now, then in zip(sums(prefetcher), before, strict=True)] == [0, adapter.bytes, 0]
        link.passes.release(LAYERS)
        until(store, lambda: store.ready(adapter.digest))  # noqa: B023
        store.retract(adapter.digest)


def test_few_prefetches_go_on_at_once_the_likeliest_first(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher()
    adapters = world.adapters[:4]
    prefetcher.want(wanted(*(want(adapter, tier="host") for adapter in adapters)))
    poll_until(store, prefetcher, lambda: len(stile.begun) == 2)
    assert set(prefetcher._underway) == {adapter.digest for adapter in adapters[:2]}
    stile.let(adapters[0], 100)
    poll_until(store, prefetcher, lambda: stile.reads(adapters[2]) > 0)
    assert prefetcher.underway == 2


def test_none_begins_while_a_request_waits_for_its_load(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher()
    called, wished = full_adapters(world)[:2]
    call(store, prefetcher, called)
    prefetcher.want(wanted(want(wished)))
    poll_until(store, prefetcher, lambda: stile.reads(called) > 0)
    held = lease(store, called)
    store.retract(called.digest)
    for _ in range(5):
        prefetcher.poll()
    assert prefetcher.underway == 0
    stile.let(called, LAYERS)
    poll_until(store, prefetcher, lambda: store.loaded(held) and prefetcher.underway == 1)
    store.release(held, [])


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("how", ["expired", "replaced", "evicted by an operator"])
def test_what_is_no_longer_wanted_ends(world: World, make_prefetcher: MakePrefetcher, how: str) -> None:
    store, prefetcher, stile = make_prefetcher()
    adapter = full_adapters(world)[0]
    prefetcher.want(wanted(want(adapter), seconds=60.0))
    stile.let(adapter, 2)
    poll_until(store, prefetcher, lambda: here(store, adapter) == 2 and stile.reads(adapter) == 3)
    host = store.hosts.get(adapter.digest)
    assert host is not None
    share = host.fetched
    if how == "expired":
        prefetcher._until = time.monotonic()
        prefetcher.poll()
    elif how == "replaced":
        prefetcher.want(wanted())
    else:
        prefetcher.cancel(adapter.digest)
        prefetcher.poll()
    assert prefetcher.underway == 0
    assert sums(prefetcher) == (0, 0, round(adapter.bytes * share))
    stile.open_all()
    until(store, lambda: bool(host.failed))
    assert stile.reads(adapter) == 3


def test_without_prefetching_wants_are_not_followed(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, _ = make_prefetcher(waste=None)
    prefetcher.want(wanted(want(world.adapters[0])))
    for _ in range(5):
        prefetcher.poll()
    assert (prefetcher.underway, list(store.hosts.all())) == (0, [])


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("fate", ["called", "evicted", "unused", "wanted still"])
def test_a_prefetched_adapter_is_judged_once(
    world: World, make_prefetcher: MakePrefetcher, monkeypatch: pytest.MonkeyPatch, fate: str, pinned: bool
) -> None:
    """A pinned one not at all."""
    store, prefetcher, stile = make_prefetcher()
    stile.open_all()
    adapter = world.adapters[0]
    prefetcher.want(wanted(want(adapter, pinned=pinned)))
    poll_until(store, prefetcher, lambda: store.ready(adapter.digest) and not prefetcher.underway)
    size = adapter.bytes
    prefetcher.poll()
    assert sums(prefetcher) == (0, 0, 0)
    if fate == "called":
        for _ in range(2):
            call(store, prefetcher, adapter)
            store.retract(adapter.digest)
    if fate == "evicted":
        prefetcher.clear()
        host = store.hosts.get(adapter.digest)
        assert store.discard(adapter.digest) and host is not None
        store.hosts.forget(host)
    if fate == "unused":
        prefetcher.clear()
    monkeypatch.setattr(module, "UNUSED_S", 0.0)
    for _ in range(3):
        prefetcher.poll()
    expected = {"called": (size, 0, 0), "evicted": (0, 0, size), "unused": (0, 0, size), "wanted still": (0, 0, 0)}
    assert sums(prefetcher) == ((0, 0, 0) if pinned else expected[fate])


def test_waste_holds_back_unlikely_adapters_and_none_that_are_pinned(
    world: World, make_prefetcher: MakePrefetcher
) -> None:
    """A forced history: half of the bytes wasted. Then likelier ones go on, one at a time; it recovers with time."""
    store, prefetcher, stile = make_prefetcher()
    unlikely, likely, second, pinned = world.adapters[:4]
    leeway = store.adapter_memory // module.LEEWAY
    prefetcher.record.count_bytes(time.monotonic(), wasted=leeway)
    least = prefetcher.record.bounds(time.monotonic()).min_chance
    assert 0.5 < least < 0.9
    prefetcher.want(wanted(want(unlikely, 0.5), want(likely, 0.9), want(second, 0.9), want(pinned, 0.0, pinned=True)))
    poll_until(store, prefetcher, lambda: prefetcher.underway == 2)
    assert set(prefetcher._underway) == {likely.digest, pinned.digest}
    stile.open_all()
    poll_until(store, prefetcher, lambda: store.ready(second.digest) and not prefetcher.underway)
    assert store.hosts.get(unlikely.digest) is None
    prefetcher.record._fade(time.monotonic() + 1000.0)
    poll_until(store, prefetcher, lambda: prefetcher.underway == 0 and here(store, unlikely) > 0)


def test_eviction_is_told_the_chances_while_they_hold(
    world: World, make_prefetcher: MakePrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, prefetcher, _ = make_prefetcher()
    told: list[Mapping[str, float]] = []
    monkeypatch.setattr(store, "expect", told.append)
    first, second = world.adapters[:2]
    prefetcher.want(wanted(want(first, 0.25), want(second, 0.5, pinned=True), want(first, 0.75), seconds=60.0))
    assert told == [{first.digest: 0.25, second.digest: 1.0}]
    prefetcher._until = time.monotonic()
    prefetcher.poll()
    assert told[1:] == [{}]
