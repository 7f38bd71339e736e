"""Predicted prefetches, read by read: what they give way to, what they may evict, and what is left of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from adapters.artifact import read_header
from cluster.messages import Adapter
from node_agent.adapter_memory import fetch, ranges
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.layout import lay_out
from node_agent.adapter_memory.loader_threads import Priority
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import LinkConfig
from node_agent.engine import prefetcher as module
from node_agent.engine.prefetch_record import MOST_AT_ONCE
from node_agent.engine.prefetcher import Prefetcher
from node_agent.types import LayerState, Lease, NoRoom, Pending, TooLarge
from tests.node_agent.adapter_world import LAYERS, World, assert_contents, assert_layer, lease, loaded_lease, until
from tests.node_agent.prefetch_world import Stile, full_adapters, here, poll_until, sums, want, wanted
from tests.node_agent.test_loader_threads import Flaky

MakePrefetcher = Callable[..., tuple[AdapterStore, Prefetcher, Stile]]


@pytest.fixture
def make_prefetcher(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePrefetcher]:
    """Stores with a prefetcher each; at the end of the test nothing is held, and memory is as its books say."""
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "RECENT_S", 1e6)  # a host that stalls makes nothing old
    made: list[tuple[AdapterStore, Prefetcher, Stile]] = []

    def make(waste: float | None = 0.25, **settings: object) -> tuple[AdapterStore, Prefetcher, Stile]:
        stile = Stile(world.objects)
        store = world.store(stile, **settings)  # type: ignore[arg-type]
        made.append((store, Prefetcher(store, waste), stile))
        return made[-1]

    yield make
    for store, prefetcher, stile in made:
        stile.open_all()
        prefetcher.clear()
        assert_nothing_held(store, prefetcher)
        store.close()


def assert_nothing_held(store: AdapterStore, prefetcher: Prefetcher) -> None:
    hosts = store.hosts
    until(store, lambda: not (hosts._fetching or hosts._measuring or hosts._leaving or store.loads._entries))
    assert (prefetcher.underway, hosts._waiters, store.leases) == (0, {}, 0)
    assert check_memory(store) == []
    for digest in list(store.device):
        assert store.discard(digest)
    for host in list(hosts.all()):
        hosts.forget(host)
    assert (hosts.used, store.pool.free_bytes) == (0, store.pool.size)


def call(store: AdapterStore, prefetcher: Prefetcher, adapter: Adapter) -> None:
    """As a request that comes to the engine."""
    store.announce(adapter)
    prefetcher.note_call(adapter.digest)


def bring(store: AdapterStore, *adapters: Adapter) -> None:
    """To the device, idle there; the prefetcher has seen no call."""
    for adapter in adapters:
        store.release(loaded_lease(store, adapter), [])


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


def world_size(store: AdapterStore, adapter: Adapter) -> int:
    """Bytes of host memory that the adapter takes."""
    header = read_header(store.loader.store, adapter.artifact)
    return lay_out(header, store.base, store.pool.data.element_size(), store.pool.page_units).size


class CountedLink:
    """A link that carries as many layers as the test lets it."""

    def __init__(self) -> None:
        self.passes = threading.Semaphore(0)
        self.waiting = 0

    def carry(self, size: int) -> None:
        self.waiting += 1
        assert self.passes.acquire(timeout=60)
        self.waiting -= 1


def test_a_request_takes_the_room_of_a_copy_that_was_only_predicted(
    world: World, make_prefetcher: MakePrefetcher
) -> None:
    store, prefetcher, stile = make_prefetcher(adapter_slots=1)
    link = CountedLink()
    store.loader.device_link = link  # type: ignore[assignment]
    stile.open_all()
    fetched, called = full_adapters(world)[:2]
    prefetcher.want(wanted(want(fetched)))
    poll_until(store, prefetcher, lambda: link.waiting == 1)
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
    link = CountedLink()
    store.loader.device_link = link  # type: ignore[assignment]
    prefetcher.want(wanted(want(fetched)))
    poll_until(store, prefetcher, lambda: link.waiting == 1)
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


def test_a_copy_that_a_request_needs_itself_goes_on(world: World, make_prefetcher: MakePrefetcher) -> None:
    store, prefetcher, stile = make_prefetcher(adapter_slots=1)
    link = CountedLink()
    store.loader.device_link = link  # type: ignore[assignment]
    stile.open_all()
    adapter, other = full_adapters(world)[:2]
    prefetcher.want(wanted(want(adapter)))
    poll_until(store, prefetcher, lambda: link.waiting == 1)
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


@pytest.mark.parametrize(
    ("chances", "called", "pinned", "gone"),
    [
        ((None, None, None), (), False, 0),  # the least recently used
        ((None, None, None), (0,), False, 1),
        ((None, None, None), (0, 1, 2), False, None),
        ((None, None, None), (0, 1, 2), True, 0),
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
    """Three slots are full; `chances` of the adapters there, which of them were called lately, and which one goes."""
    store, prefetcher, stile = make_prefetcher(adapter_memory=2 << 20, eviction="lru")
    stile.open_all()
    there, wished = world.adapters[:3], world.adapters[3]
    bring(store, *there)
    for index in called:
        prefetcher.note_call(there[index].digest)
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
    poll_until(store, prefetcher, lambda: len(prefetcher._rests) == 2)
    assert (prefetcher.underway, stile.begun, sums(prefetcher)) == (0, [], (0, 0, 0))
    for _ in range(5):
        prefetcher.poll()
    assert prefetcher.underway == 0


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
    prefetcher.record.note(time.monotonic(), wasted=leeway)
    least = prefetcher.record.bounds(time.monotonic()).least_chance
    assert 0.5 < least < 0.9
    prefetcher.want(wanted(want(unlikely, 0.5), want(likely, 0.9), want(second, 0.9), want(pinned, 0.0, pinned=True)))
    poll_until(store, prefetcher, lambda: prefetcher.underway == 2)
    assert set(prefetcher._underway) == {likely.digest, pinned.digest}
    stile.open_all()
    poll_until(store, prefetcher, lambda: store.ready(second.digest) and not prefetcher.underway)
    assert store.hosts.get(unlikely.digest) is None
    prefetcher.record._fade(time.monotonic() + 1000.0)
    poll_until(store, prefetcher, lambda: prefetcher.underway == 0 and here(store, unlikely) > 0)


class Caller:
    """Draws what requests, the gateway, operators and time may do to the prefetches of one store."""

    def __init__(self, world: World, store: AdapterStore, prefetcher: Prefetcher, seed: int) -> None:
        self.world, self.store, self.prefetcher, self.rng = world, store, prefetcher, random.Random(seed)
        self.waiting: list[Adapter] = []
        self.held: list[Lease] = []

    def step(self) -> None:
        rng, store, prefetcher = self.rng, self.store, self.prefetcher
        adapter = rng.choice(self.world.adapters)
        match rng.choice(
            ["call", "leave", "leave", "lease", "lease", "release", "want", "want", "end", "wait", "wait"]
        ):
            case "call" if len(self.waiting) < 2:
                call(store, prefetcher, adapter)
                self.waiting.append(adapter)
            case "leave" if self.waiting:
                store.retract(self.waiting.pop(rng.randrange(len(self.waiting))).digest)
            case "lease" if self.waiting and len(self.held) < 2:
                found = store.acquire(self.waiting[0])
                if isinstance(found, Lease):
                    self.held.append(found)
                    store.retract(self.waiting.pop(0).digest)
            case "release" if self.held:
                store.release(self.held.pop(rng.randrange(len(self.held))), [])
            case "want":
                chosen = rng.sample(self.world.adapters, rng.randint(0, 4))
                wants = [want(a, rng.random(), tier=rng.choice(["device", "host"])) for a in chosen]
                prefetcher.want(wanted(*wants, seconds=rng.choice([0.0, 0.005, 60.0])))
            case "end":
                rng.choice([prefetcher.clear, lambda: prefetcher.cancel(adapter.digest)])()
                prefetcher._rests.clear()
            case "wait":
                time.sleep(0.002)
        store.poll()
        prefetcher.poll()
        self.check()

    def check(self) -> None:
        store = self.store
        assert self.prefetcher.underway <= MOST_AT_ONCE
        assert check_memory(store) == []
        for held in self.held:
            for layer in range(LAYERS):
                if store.state(held, layer) == LayerState.DEVICE:
                    assert_layer(self.world, held.digest, store.table, store.pool.data, held.slot, layer)

    def leave(self) -> None:
        for adapter in self.waiting:
            self.store.retract(adapter.digest)
        for held in self.held:
            self.store.release(held, [])


@pytest.mark.parametrize("seed", range(6))
def test_drawn_calls_wants_and_faults_leave_nothing_behind(
    world: World, make_prefetcher: MakePrefetcher, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """No layer is wrong and no page has two owners; at the end all is free."""
    monkeypatch.setattr(fetch, "BACK_OFF", 0.001)
    monkeypatch.setattr(module, "RECENT_S", 0.01)
    if seed % 2:
        monkeypatch.setattr(ranges, "FIRST_RANGE", 1)
        monkeypatch.setattr(ranges, "LARGEST_RANGE", 1)
    links = {"load_link": LinkConfig(5e7), "store_link": LinkConfig(2e7, 1e-4)}
    store, prefetcher, stile = make_prefetcher(1.0, host_memory=1 << 20, **links)
    store.hosts.failure_memory = 0.0
    flaky, read = Flaky(seed), stile.get_range_into

    def spoilt(key: str, start: int, buffer: memoryview) -> int:
        found = read(key, start, buffer)
        other = flaky(start, buffer)
        return found if other is None else other

    monkeypatch.setattr(stile, "get_range_into", spoilt)
    stile.open_all()
    caller = Caller(world, store, prefetcher, seed)
    for _ in range(150):
        caller.step()
    caller.leave()
    prefetcher._rests.clear()
    for adapter in world.adapters:
        store.discard(adapter.digest)
    prefetcher.want(wanted(*map(want, world.adapters)))
    poll_until(store, prefetcher, lambda: prefetcher.underway > 0)
    prefetcher.clear()
    assert_nothing_held(store, prefetcher)
    assert not store.table.rank.any() and not store.hosts.table.rank.any()


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
