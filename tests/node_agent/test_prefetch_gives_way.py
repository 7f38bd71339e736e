"""Predicted prefetches, read by read: what a request takes over, and what stands still or ends for it."""

from __future__ import annotations

import time

import pytest

from node_agent.adapter_memory import loader
from node_agent.adapter_memory.priority import Priority
from node_agent.leases import LayerState, Lease, NoRoom, Pending, TooLarge
from tests.node_agent.adapter_world import LAYERS, World, assert_contents, lease, until
from tests.node_agent.coldstart.pools import eventually
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


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("layers", range(LAYERS + 1))
def test_a_call_takes_the_prefetch_of_its_adapter_over(
    world: World, make_prefetcher: MakePrefetcher, layers: int
) -> None:
    """So many layers have come: none is read twice, and what is left comes as fast as for any request."""
    store, prefetcher, stile = make_prefetcher()
    adapter = full_adapters(world)[0]
    prefetcher.want(wanted(want(adapter)))
    stile.let(adapter, layers)
    reached = lambda: here(store, adapter) == layers and stile.reads(adapter) == min(layers + 1, LAYERS)  # noqa: E731
    poll_until(store, prefetcher, reached if layers < LAYERS else lambda: store.ready(adapter.digest))
    host = store.hosts.get(adapter.digest)
    assert host is not None and host.header is not None
    assert host.priority == Priority.PREDICTED
    left = host.bytes_left(LAYERS) / sum(block.size for block in host.header.layers)
    call(store, prefetcher, adapter)
    assert host.priority == Priority.REQUEST
    assert sums(prefetcher) == (round(adapter.bytes * (1 - left)), round(adapter.bytes * left), 0)
    assert prefetcher.underway == 0
    poll_until(store, prefetcher, lambda: stile.reads(adapter) == min(layers + 3, LAYERS))  # three in flight now
    store.retract(adapter.digest)
    held = lease(store, adapter)
    stile.open_all()
    until(store, lambda: store.loaded(held))
    assert_contents(store, world, held)
    assert stile.reads(adapter) == LAYERS
    assert store.load_seconds(held) > 0
    store.release(held, [])


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("layers", range(LAYERS))
def test_a_prefetch_stands_still_while_another_adapter_is_called(
    world: World, make_prefetcher: MakePrefetcher, layers: int
) -> None:
    """What it reads ends; it begins nothing until the request's load is done, keeps its layers and then goes on."""
    store, prefetcher, stile = make_prefetcher()
    fetched, called = full_adapters(world)[:2]
    prefetcher.want(wanted(want(fetched)))
    stile.let(fetched, layers)
    poll_until(store, prefetcher, lambda: here(store, fetched) == layers and stile.reads(fetched) == layers + 1)
    call(store, prefetcher, called)
    stile.let(fetched, LAYERS)
    for done in range(LAYERS):
        poll_until(store, prefetcher, lambda: here(store, called) == done)  # noqa: B023
        poll_until(store, prefetcher, lambda: here(store, fetched) == layers + 1)
        time.sleep(0.002)
        assert stile.reads(fetched) == layers + 1
        stile.let(called)
    held = lease(store, called)
    store.retract(called.digest)
    poll_until(store, prefetcher, lambda: store.loaded(held) and store.ready(fetched.digest))
    assert (stile.reads(fetched), stile.reads(called)) == (LAYERS, LAYERS)
    assert_contents(store, world, held)
    store.release(held, [])
    held = lease(store, fetched)
    assert_contents(store, world, held)
    store.release(held, [])


@pytest.mark.usefixtures("by_layer")
def test_a_prefetch_stands_still_while_a_request_reads_its_header(
    world: World, make_prefetcher: MakePrefetcher
) -> None:
    store, prefetcher, stile = make_prefetcher()
    fetched, called = full_adapters(world)[:2]
    prefetcher.want(wanted(want(fetched)))
    poll_until(store, prefetcher, lambda: stile.reads(fetched) == 1)
    stile.headers.clear()
    call(store, prefetcher, called)
    stile.let(fetched, LAYERS)
    poll_until(store, prefetcher, lambda: here(store, fetched) == 1)
    time.sleep(0.02)
    assert stile.reads(fetched) == 1
    stile.headers.set()
    store.retract(called.digest)  # the caller goes: nothing else wakes the threads
    poll_until(store, prefetcher, lambda: store.ready(fetched.digest))


@pytest.mark.usefixtures("by_layer")
def test_loads_of_the_batch_go_before_those_of_the_queue(
    world: World, make_prefetcher: MakePrefetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread; two requests are queued whose adapters load when a third one gets its place in the batch."""
    monkeypatch.setattr(loader, "STORE_THREADS", 1)
    store, prefetcher, stile = make_prefetcher()
    *queued, admitted = full_adapters(world)[:3]
    for adapter in queued:
        store.announce(adapter)
    poll_until(store, prefetcher, lambda: len(stile.begun) == 1)
    held = lease(store, admitted)
    stile.open_all()
    poll_until(store, prefetcher, lambda: store.loaded(held) and all(here(store, a) == LAYERS for a in queued))
    reads = [key for key, _ in stile.begun]
    assert reads[1 : 1 + LAYERS] == [admitted.artifact] * LAYERS
    store.release(held, [])
    for adapter in queued:
        store.retract(adapter.digest)


@pytest.mark.usefixtures("by_layer")
def test_a_prefetch_goes_on_when_a_request_is_refused(world: World, make_prefetcher: MakePrefetcher) -> None:
    """Its adapter is larger than host memory: no fetch of it begins or ends, so that nothing else wakes the threads."""
    store, prefetcher, stile = make_prefetcher()
    fetched, called = full_adapters(world)[:2]
    prefetcher.want(wanted(want(fetched)))
    poll_until(store, prefetcher, lambda: stile.reads(fetched) == 1)
    full, store.hosts.memory = store.hosts.memory, world_size(store, called) - 1
    call(store, prefetcher, called)
    stile.let(fetched)
    poll_until(store, prefetcher, lambda: here(store, fetched) == 1 and isinstance(store.acquire(called), TooLarge))
    store.retract(called.digest)
    store.hosts.memory = full
    deadline = time.monotonic() + 30
    while stile.reads(fetched) == 1:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("layers", [1, LAYERS - 1])
def test_a_request_takes_the_host_memory_of_a_prefetch(
    world: World, make_prefetcher: MakePrefetcher, layers: int
) -> None:
    """Also of one that is nearly done and stands still: it would wait for the request, and the request for it. What it
    had brought is wasted, and it begins anew when there is room."""
    store, prefetcher, stile = make_prefetcher()
    fetched, called = full_adapters(world)[:2]
    prefetcher.want(wanted(want(fetched)))
    stile.let(fetched, layers - 1)
    poll_until(store, prefetcher, lambda: stile.reads(fetched) == layers)
    stile.headers.clear()
    call(store, prefetcher, called)
    stile.let(fetched)
    poll_until(store, prefetcher, lambda: here(store, fetched) == layers)
    prefetcher.poll()  # it sees as much
    host, full = store.hosts.get(fetched.digest), store.hosts.memory
    assert host is not None and host.nearly_done == (layers > 1)
    stile.headers.set()
    store.hosts.memory = max(store.hosts.used, world_size(store, called))
    stile.let(called, LAYERS)
    poll_until(store, prefetcher, lambda: here(store, called) == LAYERS)
    assert sums(prefetcher) == (0, 0, round(fetched.bytes * host.fetched))
    assert stile.reads(fetched) == layers
    store.retract(called.digest)
    store.hosts.memory = full
    prefetcher._rests.clear()
    stile.open_all()
    poll_until(store, prefetcher, lambda: store.ready(fetched.digest))


def test_a_request_takes_the_room_of_a_copy_that_was_only_predicted(
    world: World, make_prefetcher: MakePrefetcher
) -> None:
    store, prefetcher, stile = make_prefetcher(adapter_slots=1)
    fetched, called = full_adapters(world)[:2]
    link = begin_predicted_copy(store, prefetcher, stile, fetched)
    call(store, prefetcher, called)
    poll_until(store, prefetcher, lambda: here(store, called) == LAYERS)
    assert isinstance(store.acquire(called), Pending), "no NoRoom: then others might be preempted for it"
    assert store.on_device(fetched.digest)
    link.passes.release(1)  # the layer that was under way
    poll_until(store, prefetcher, lambda: not store.on_device(fetched.digest))
    held = store.acquire(called)
    assert isinstance(held, Lease)
    link.passes.release(2 * LAYERS)
    poll_until(store, prefetcher, lambda: store.loaded(held))
    store.retract(called.digest)
    assert_contents(store, world, held)
    host = store.hosts.get(fetched.digest)
    assert host is not None and host.complete, "it stays in host memory"
    store.release(held, [])


def test_a_copy_stands_still_while_a_requests_copy_goes_on(world: World, make_prefetcher: MakePrefetcher) -> None:
    """The layer that crosses ends, and all that the link carries then is the request's."""
    store, prefetcher, stile = make_prefetcher()
    stile.open_all()
    fetched, called = full_adapters(world)[:2]
    bring(store, called)
    assert store.discard(called.digest)  # it stays in host memory
    link = begin_predicted_copy(store, prefetcher, stile, fetched)
    call(store, prefetcher, called)
    held = store.acquire(called)
    assert isinstance(held, Lease)
    store.retract(called.digest)
    poll_until(store, prefetcher, lambda: link.waiting == 2)
    link.passes.release(1 + LAYERS)
    poll_until(store, prefetcher, lambda: store.loaded(held))
    assert store.device[fetched.digest].copy.layers.count(LayerState.DEVICE) == 1
    link.passes.release(LAYERS - 1)
    poll_until(store, prefetcher, lambda: store.ready(fetched.digest))
    store.release(held, [])
    held = lease(store, fetched)
    assert_contents(store, world, held)
    store.release(held, [])


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_copy_took_before_its_adapter_was_called_is_not_the_requests(
    world: World, make_prefetcher: MakePrefetcher, ended: bool
) -> None:
    store, prefetcher, stile = make_prefetcher()
    adapter = full_adapters(world)[0]
    link = begin_predicted_copy(store, prefetcher, stile, adapter)
    entry = store.device[adapter.digest]
    entry.began -= 100.0
    if ended:
        link.passes.release(LAYERS)
        eventually(lambda: entry.copy.ended)
    call(store, prefetcher, adapter)
    held = store.acquire(adapter)
    assert isinstance(held, Lease)
    link.passes.release(LAYERS)
    poll_until(store, prefetcher, lambda: store.loaded(held))
    assert 0 < store.load_seconds(held) < 60
    assert (store.source(held), store.fetch_seconds(held)) == ("host", 0.0)
    store.retract(adapter.digest)
    store.release(held, [])


def test_a_copy_that_a_request_needs_itself_goes_on(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher(adapter_slots=1)
    adapter, other = full_adapters(world)[:2]
    link = begin_predicted_copy(store, prefetcher, stile, adapter)
    call(store, prefetcher, adapter)
    held = store.acquire(adapter)
    assert isinstance(held, Lease)
    store.retract(adapter.digest)
    call(store, prefetcher, other)
    poll_until(store, prefetcher, lambda: here(store, other) == LAYERS)
    assert isinstance(store.acquire(other), NoRoom)
    store.retract(other.digest)
    link.passes.release(LAYERS)
    poll_until(store, prefetcher, lambda: store.loaded(held))
    assert store.source(held) == "host"
    store.release(held, [])
