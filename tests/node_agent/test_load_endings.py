"""Loads that do not go straight to their end: spoilt reads, stalls, and callers that leave."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adapters.artifact import read_header
from cluster.messages import Adapter
from node_agent.adapter_memory.fetch import RANGES_IN_FLIGHT, TRIES, UNWANTED
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.loads import NEARLY_DONE, HostAdapter
from node_agent.adapter_memory.store import AdapterStore
from node_agent.leases import LayerState, Lease, Pending
from node_agent.states import HostState
from tests.node_agent.adapter_world import (
    LAYERS,
    Turnstile,
    World,
    assert_contents,
    lease,
    starts,
    states,
    until,
)


def _short(_: memoryview) -> int:
    return 5


def _flip(buffer: memoryview) -> None:
    buffer[-1] ^= 1


def _raise(_: memoryview) -> int:
    raise OSError("connection reset")


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("spoil", [_short, _flip, _raise])
@pytest.mark.parametrize("times", [1, TRIES - 1, TRIES])
def test_a_spoilt_layer_is_read_again_and_no_other(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, spoil: Callable[..., int], times: int
) -> None:
    offsets, spoilt = starts(world, adapter), []

    def spoil_layer_2(start: int, buffer: memoryview) -> int | None:
        if start == offsets[2] and len(spoilt) < times:
            spoilt.append(start)
            return spoil(buffer)
        return None

    turnstile.spoil = spoil_layer_2
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held) or bool(store.failure(held)))
    assert turnstile.reads.count(offsets[2]) == min(times + 1, TRIES)
    assert all(turnstile.reads.count(start) <= 1 for start in offsets if start != offsets[2])
    if times < TRIES:
        assert_contents(store, world, held)
    else:
        assert states(store, held) == [LayerState.FAILED] * LAYERS
        failure = store.failure(held)
        assert failure is not None and failure.damaged == (spoil is not _raise)
        with pytest.raises(RuntimeError, match="before it is on the device"):
            store.layer_weights(held, 2)  # those before it were verified, and a pass may be reading them
    store.release(held, [])
    assert check_memory(store) == []


def test_a_range_goes_on_from_the_layer_that_was_spoilt(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    """All layers are one range; the second read begins where the first was wrong."""
    offsets = starts(world, adapter)

    def spoil_layer_3(start: int, buffer: memoryview) -> None:
        if start == offsets[0]:
            buffer[offsets[3] - offsets[0]] ^= 1

    turnstile.spoil = spoil_layer_3
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert turnstile.reads == [offsets[0], offsets[3]]
    assert_contents(store, world, held)
    store.release(held, [])


def test_a_deleted_artifact_fails_its_load_at_once(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    held = lease(store, adapter)
    turnstile.await_waiting(1)
    kept = world.objects.get(adapter.artifact).data
    world.objects.delete(adapter.artifact)
    try:
        turnstile.open_all()
        until(store, lambda: bool(store.failure(held)))
        failure = store.failure(held)
        assert failure is not None and failure.damaged and "NotFound" in failure.reason
        assert len(turnstile.reads) == 1
    finally:
        world.objects.put(adapter.artifact, kept)
    store.release(held, [])


def test_a_stalled_load_that_is_wanted_again_goes_on(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    store.announce(adapter)
    until(store, lambda: bool(turnstile.waiting))
    store.retract(adapter.digest)
    store.announce(adapter)
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert len(turnstile.reads) == 1
    store.retract(adapter.digest)
    store.release(held, [])


@pytest.mark.usefixtures("by_layer")
def test_a_stalled_load_that_nobody_wants_gives_everything_back(
    store: AdapterStore, turnstile: Turnstile, adapter: Adapter
) -> None:
    store.announce(adapter)
    until(store, lambda: len(turnstile.waiting) == RANGES_IN_FLIGHT)
    store.retract(adapter.digest)
    turnstile.open_all()
    until(store, lambda: not store.hosts._all and not store.hosts._fetching)
    assert store.hosts.used == 0
    assert not store.hosts.table.rank.any()
    assert len(turnstile.reads) == RANGES_IN_FLIGHT, "the rest was not read"


def leave_after(store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, layers: int) -> Lease:
    """A lease that ends when so many layers of its load are on the device."""
    offsets, held = starts(world, adapter), lease(store, adapter)
    for layer in range(layers):
        turnstile.await_waiting(min(RANGES_IN_FLIGHT, LAYERS - layer))
        turnstile.let(offsets[layer])
        until(store, lambda at=layer: store.state(held, at) == LayerState.DEVICE)  # type: ignore[misc]
    store.release(held, [])
    return held


@pytest.mark.usefixtures("by_layer")
def test_a_load_whose_caller_leaves_early_gives_everything_back(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    """Though it had room on the device, and copied; what is in flight may end, and no more is read."""
    leave_after(store, turnstile, world, adapter, 1)
    until(store, lambda: not store.device)
    turnstile.open_all()
    until(store, lambda: not list(store.hosts.all()))
    assert store.pool.free_bytes == store.pool.size
    assert store.hosts.used == 0
    assert not store.table.rank.any() and not store.hosts.table.rank.any()
    assert len(turnstile.reads) <= 1 + RANGES_IN_FLIGHT
    assert check_memory(store) == []


@pytest.mark.usefixtures("by_layer")
def test_a_load_that_is_nearly_done_is_ended_for_the_next_caller(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter
) -> None:
    sizes = [block.size for block in read_header(world.objects, adapter.artifact).layers]
    assert sizes[-1] <= NEARLY_DONE * sum(sizes)
    leave_after(store, turnstile, world, adapter, LAYERS - 1)
    turnstile.open_all()
    until(store, lambda: store.ready(adapter.digest))
    again = lease(store, adapter)
    assert_contents(store, world, again)
    assert len(turnstile.reads) == LAYERS
    store.release(again, [])


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("how", ["queued", "leased", "pinned"])
def test_a_load_goes_on_for_whoever_else_wants_it(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, how: str
) -> None:
    other = lease(store, adapter) if how == "leased" else None
    if how == "queued":
        store.announce(adapter)
    elif how == "pinned":
        store.pin([adapter.digest])
    leave_after(store, turnstile, world, adapter, 1)
    turnstile.open_all()
    until(store, lambda: store.ready(adapter.digest))
    assert len(turnstile.reads) == LAYERS
    if how == "queued":
        store.retract(adapter.digest)
    if other is not None:
        store.release(other, [])


@pytest.mark.usefixtures("by_layer")
@pytest.mark.parametrize("polled", [False, True])
def test_an_adapter_that_is_wanted_again_while_its_load_is_given_up(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, polled: bool
) -> None:
    """Whether its place on the device has gone by then or not, the next caller gets it, whole."""
    leave_after(store, turnstile, world, adapter, 1)
    if polled:
        until(store, lambda: not store.device)
    store.announce(adapter)
    found = store.acquire(adapter)
    assert polled or isinstance(found, (Pending, Lease))
    turnstile.open_all()
    held = found if isinstance(found, Lease) else lease(store, adapter)
    store.retract(adapter.digest)
    until(store, lambda: store.loaded(held))
    assert_contents(store, world, held)
    assert check_memory(store) == []
    store.release(held, [])


def test_a_load_that_is_given_up_as_its_adapter_is_called_again_fails_no_call(
    store: AdapterStore, turnstile: Turnstile, world: World, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread says so between two looks of the call: that one is told to wait, and the next load is its own."""
    turnstile.open_all()
    store.announce(adapter)
    real, given_up = store.hosts.load, []

    def load(wanted: Adapter) -> HostAdapter:
        host = real(wanted)
        if not given_up:
            given_up.append(host)
            host.failure, host.state = UNWANTED, HostState.ABANDONED
        return host

    with monkeypatch.context() as patch:
        patch.setattr(store.hosts, "load", load)
        assert isinstance(store.acquire(adapter), Pending)
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert given_up and store.device[adapter.digest].host is not given_up[0]
    assert_contents(store, world, held)
    store.retract(adapter.digest)
    store.release(held, [])
