"""Adapter memory: leases, eviction, contents, failures, and that everything returns to free."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adapters.store import Arrived, ObjectStore
from cluster.messages import Adapter
from node_agent.adapter_memory.eviction import POLICIES
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.runs import FreeRuns
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import LinkConfig
from node_agent.leases import LayerState, Lease, LoadFailed, NoRoom, Pending, TooLarge
from tests.node_agent.adapter_world import (
    LateEvent,
    World,
    assert_contents,
    assert_layer,
    comes_with_header,
    header_only,
    host_slot,
    lease,
    loaded_lease,
    measured,
    until,
)
from tests.node_agent.memory_usage import device_usage, host_usage


class StoreMachine(RuleBasedStateMachine):
    """Drawn acquires, late releases, forecasts and polls over a pool for about two adapters, by every policy."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Lease] = []
        self.late: list[LateEvent] = []
        self.reading: list[tuple[LateEvent, str, list[int]]] = []
        self.pinned_here: set[str] = set()
        self.holds: list[tuple[HostAdapter, list[int]]] = []

    def teardown(self) -> None:
        for event in self.late:
            event.ended = True
        for held in self.held:
            self.store.release(held, [])
        for hold, _ in self.holds:
            self.store.release_host(hold)
        deadline = time.monotonic() + 30
        while self.store.leases or any(not e.settled for e in self.store.device.values()):
            self.store.poll()
            assert time.monotonic() < deadline
        for digest in list(self.store.device):
            self.store.room.evict(digest)
        assert self.store.pool.free_bytes == self.store.pool.size
        while self.store.hosts._fetching or self.store.hosts._unfetched or self.store.hosts._measuring:
            self.store.poll()
            assert time.monotonic() < deadline
        for host in list(self.store.hosts.complete()):
            self.store.hosts.forget(host)
        self.store.poll()
        assert self.store.hosts.used == 0
        assert not self.store.table.rank.any()
        assert not self.store.hosts.table.rank.any()
        self.store.close()

    @initialize(eviction=st.sampled_from(sorted(POLICIES)))
    def open(self, eviction: str) -> None:
        self.store = self.world.store(eviction=eviction)

    @rule(i=st.integers(0, 5), chance=st.floats(0, 1))
    def expect(self, i: int, chance: float) -> None:
        self.store.expect({self.world.adapters[i].digest: chance})

    @rule(i=st.integers(0, 5))
    def acquire(self, i: int) -> None:
        found = self.store.acquire(self.world.adapters[i])
        if isinstance(found, Lease):
            self.held.append(found)
        else:
            assert isinstance(found, (NoRoom, Pending, TooLarge))

    @rule(i=st.integers(0, 5))
    def load_wholly(self, i: int) -> None:
        found = measured(self.store, self.world.adapters[i])
        if isinstance(found, Lease):
            self.held.append(found)
            until(self.store, lambda: self.store.loaded(found))
            assert all(self.store.state(found, layer) == LayerState.DEVICE for layer in range(5))

    # Whether an acquire succeeds depends on the workers' timing, so rules draw the same whatever has happened.
    @rule(which=st.integers(0, 7), late=st.booleans())
    def release(self, which: int, late: bool) -> None:
        if not self.held:
            return
        held = self.held.pop(which % len(self.held))
        events = []
        if late:
            events = [LateEvent()]
            self.late += events
            self.reading.append((events[0], held.digest, list(self.store.device[held.digest].pages)))
        self.store.release(held, events)

    @rule(which=st.integers(0, 7), order=st.permutations(range(5)))
    def compute_on_the_host(self, which: int, order: list[int]) -> None:
        if not self.held:
            return
        held = self.held[which % len(self.held)]
        self.store.set_order(held, order)
        hold = self.store.hold_host(held)
        if hold is not None:
            assert hold.slot == host_slot(self.store, held)
            self.holds.append((hold, list(hold.pages or ())))

    @rule(which=st.integers(0, 7))
    def end_on_the_host(self, which: int) -> None:
        if self.holds:
            self.store.release_host(self.holds.pop(which % len(self.holds))[0])

    @rule(i=st.integers(0, 5))
    def forget_on_the_host(self, i: int) -> None:
        host = self.store.hosts.get(self.world.adapters[i].digest)
        if host is not None and host.complete and not host.copying:
            self.store.hosts.forget(host)

    @rule(i=st.integers(0, 5), pinned=st.booleans())
    def pin(self, i: int, pinned: bool) -> None:
        digest, others = self.world.adapters[i].digest, self.store.room.pinned
        if pinned and len(others) < 2:  # all of a slot's adapters pinned would stop every load
            self.store.pin(others | {digest})
        elif not pinned:
            self.store.pin(others - {digest})

    @rule()
    def end_late_reader(self) -> None:
        if self.late:
            self.late.pop(0).ended = True
            self.store.poll()

    @invariant()
    def leased_contents_are_whole(self) -> None:
        self.store.poll()
        for held in self.held:
            if self.store.loaded(held):
                assert_contents(self.store, self.world, held)

    @invariant()
    def a_layer_is_what_its_state_says(self) -> None:
        """Also while the rest of the adapter is on its way."""
        for held in self.held:
            for layer in range(5):
                if self.store.state(held, layer) == LayerState.DEVICE:
                    self.store.layer_weights(held, layer)
                    data = self.store.pool.data
                    assert_layer(self.world, held.digest, self.store.table, data, held.slot, layer)

    @invariant()
    def what_workers_read_stays(self) -> None:
        hosts = self.store.hosts
        for hold, pages in self.holds:
            assert hold.pages == pages
            for layer in (at for at, here in enumerate(hold.here) if here):
                assert_layer(self.world, hold.digest, hosts.table, hosts.pool.data, hold.slot, layer)

    @invariant()
    def nothing_has_two_owners(self) -> None:
        owned = [page for entry in self.store.device.values() for page in entry.pages]
        assert len(owned) == len(set(owned)) == self.store.pool.pages.count - self.store.pool.pages.free
        slots = [e.slot for e in self.store.device.values()]
        assert len(slots) == len(set(slots))
        assert not check_memory(self.store)
        device, host = device_usage(self.store), host_usage(self.store)
        assert sum(device.pages.values()) == self.store.pool.pages.count
        assert sum(host.pages.values()) == self.store.hosts.pool.pages.count

    @invariant()
    def readers_and_pins_keep_their_adapters(self) -> None:
        """A late reader's adapter has not moved since it was released."""
        for event, digest, pages in self.reading:
            if not event.ended:
                assert self.store.device[digest].pages == pages
        here = {d for d in self.store.room.pinned if d in self.store.device}
        assert self.pinned_here & self.store.room.pinned <= here
        self.pinned_here = here


@pytest.mark.hypothesis
def test_store_state_machine(world: World) -> None:
    StoreMachine.world = world
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(stateful_step_count=20, suppress_health_check=list(HealthCheck)),
    )


def test_late_reader_keeps_its_adapter(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """A released lease whose pass still reads is neither evicted nor overwritten."""
    store = make_store(adapter_slots=1)
    held = loaded_lease(store, world.adapters[0])
    reader = LateEvent()
    store.release(held, [reader])
    assert isinstance(measured(store, world.adapters[1]), NoRoom)
    assert_contents(store, world, held)
    reader.ended = True
    store.poll()
    other = loaded_lease(store, world.adapters[1])
    assert_contents(store, world, other)
    store.release(other, [])


def test_too_large_names_both_sizes(world: World, make_store: Callable[..., AdapterStore]) -> None:
    found = measured(make_store(adapter_memory=4096), world.adapters[0])
    assert isinstance(found, TooLarge)
    assert found.have == 4096 < found.need


def test_one_load_however_many_wait(world: World, make_store: Callable[..., AdapterStore]) -> None:
    store = make_store(load_link=LinkConfig(bandwidth=3e6))
    leases = [lease(store, world.adapters[2]) for _ in range(5)]
    assert len({held.slot for held in leases}) == 1
    assert not store.loaded(leases[0])
    until(store, lambda: store.loaded(leases[0]))
    assert_contents(store, world, leases[0])
    for held in leases:
        store.release(held, [])
    with pytest.raises(RuntimeError, match="twice"):
        store.release(leases[0], [])


class FaultyStore:
    """The real store with one fault in its ranged reads."""

    def __init__(self, inner: ObjectStore, fault: Callable[[bytes], bytes]) -> None:
        self._inner, self._fault, self.armed = inner, fault, True

    def get_range(self, key: str, start: int, length: int) -> bytes:
        found = self._inner.get_range(key, start, length)
        return found if start else header_only(found)

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        if comes_with_header(start):
            return self._inner.get_range_into(key, start, buffer, arrived)
        data = self._inner.get_range(key, start, len(buffer))
        data = self._fault(data) if self.armed else data
        buffer[: len(data)] = data
        return len(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _lost(_: bytes) -> bytes:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("fault", [_flip, _lost, lambda data: data[: len(data) // 2]], ids=["bit", "lost", "short"])
def test_a_broken_read_fails_the_load_and_the_next_try_works(world: World, fault: Callable[[bytes], bytes]) -> None:
    objects = FaultyStore(world.objects, fault)
    store = world.store(objects)  # type: ignore[arg-type]
    adapter = max(world.adapters, key=lambda a: a.bytes)
    try:
        found = measured(store, adapter)
        if isinstance(found, Lease):
            until(store, lambda: bool(store.failure(found)))
            assert store.state(found, 0) == LayerState.FAILED
            assert not store.loaded(found)
            store.release(found, [])
        else:
            assert isinstance(found, LoadFailed)
        objects.armed = False
        store.hosts.failure_memory = 0.0
        store.poll()
        again = loaded_lease(store, adapter)
        assert_contents(store, world, again)
        store.release(again, [])
    finally:
        store.close()


def test_missing_artifact_is_a_load_failure(world: World, make_store: Callable[..., AdapterStore]) -> None:
    found = measured(make_store(), Adapter("0" * 64, "artifacts/v1/none/none", 1, (8,)))
    assert isinstance(found, LoadFailed)


def test_another_adapters_artifact_is_refused(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """Two digests never mix, whatever a message says."""
    first, second = world.adapters[:2]
    found = measured(make_store(), Adapter(first.digest, second.artifact, second.bytes, second.ranks))
    assert isinstance(found, LoadFailed)


@pytest.mark.parametrize("said", [(), (1,), (1000,)])
def test_a_lease_has_the_ranks_of_the_artifact(
    world: World, make_store: Callable[..., AdapterStore], said: tuple[int, ...]
) -> None:
    """Kernels size their scratch by them and cut what is beyond, so a message that has them wrong must not count."""
    store = make_store()
    adapter = world.adapters[0]
    held = loaded_lease(store, msgspec.structs.replace(adapter, ranks=said))
    ranks = store.table.rank[held.slot]
    assert held.ranks == tuple(ranks[ranks > 0].unique().tolist()) == tuple(sorted(adapter.ranks))
    store.release(held, [])


class RunsMachine(RuleBasedStateMachine):
    """FreeRuns against a plain set of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.free, self.taken = FreeRuns(50), set(range(50)), []

    @rule(length=st.integers(1, 20))
    def take(self, length: int) -> None:
        possible = any(set(range(i, i + length)) <= self.free for i in range(51 - length))
        start = self.runs.take(length)
        assert (start is not None) == possible
        if start is not None:
            assert set(range(start, start + length)) <= self.free
            self.free -= set(range(start, start + length))
            self.taken.append((start, length))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start, length = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.runs.give(start, length)
        self.free |= set(range(start, start + length))
        with pytest.raises(RuntimeError, match="twice"):
            self.runs.give(start, length)

    @invariant()
    def counts(self) -> None:
        assert sum(length for _, length in self.runs._runs) == len(self.free)


@pytest.mark.hypothesis
def test_free_runs() -> None:
    run_state_machine_as_test(RunsMachine, settings=settings())
