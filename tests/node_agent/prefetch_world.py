"""A store whose reads a test lets through one by one, and a prefetcher over it: for the tests of prefetches."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from adapters.artifact import read_header
from adapters.store import Arrived, ObjectStore
from cluster.messages import Adapter
from cluster.residency import WantedAdapter, WantedResidency
from node_agent.adapter_memory.integrity import check_memory
from node_agent.adapter_memory.layout import lay_out
from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.prefetcher import Prefetcher
from tests.node_agent.adapter_world import World, comes_with_header, header_only, loaded_lease, until

MakePrefetcher = Callable[..., "tuple[AdapterStore, Prefetcher, Stile]"]


class Stile:
    """The real store; each ranged read of an object's weights waits until the test lets one more of them through."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._changed = threading.Condition()
        self._allowed: Counter[str] = Counter()
        self._open = False
        self.begun: list[tuple[str, int]] = []
        """Reads that have come, by object and first byte."""
        self.headers = threading.Event()
        """Set: headers are read at once."""
        self.headers.set()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        assert self.headers.wait(60)
        found = self._inner.get_range(key, start, length)
        return found if start else header_only(found)

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        if comes_with_header(start):
            return self._inner.get_range_into(key, start, buffer, arrived)
        with self._changed:
            self.begun.append((key, start))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._open or self._allowed[key] > 0, 60)
            self._allowed[key] -= 1
        return self._inner.get_range_into(key, start, buffer, arrived)

    def let(self, adapter: Adapter, count: int = 1) -> None:
        with self._changed:
            self._allowed[adapter.artifact] += count
            self._changed.notify_all()

    def open_all(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def reads(self, adapter: Adapter) -> int:
        with self._changed:
            return sum(key == adapter.artifact for key, _ in self.begun)


class CountedLink:
    """A link that carries as many layers as the test lets it."""

    def __init__(self) -> None:
        self.passes = threading.Semaphore(0)
        self.waiting = 0

    def carry(self, size: int) -> None:
        self.waiting += 1
        assert self.passes.acquire(timeout=60)
        self.waiting -= 1


def wanted(*wants: WantedAdapter, seconds: float = 600.0) -> WantedResidency:
    return WantedResidency(list(wants), seconds)


def want(adapter: Adapter, chance: float = 0.9, **fields: object) -> WantedAdapter:
    return WantedAdapter(adapter, chance=chance, **{"tier": "device", **fields})  # type: ignore[arg-type]


def poll_until(store: AdapterStore, prefetcher: Prefetcher, condition: Callable[[], bool]) -> None:
    """As the engine polls, once per iteration."""
    deadline = time.monotonic() + 60
    while not condition():
        store.poll()
        prefetcher.poll()
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.0005)


def here(store: AdapterStore, adapter: Adapter) -> int:
    """Layers with bytes that have come to host memory."""
    host = store.hosts.get(adapter.digest)
    if host is None or host.header is None:
        return 0
    return sum(bool(block.size and there) for block, there in zip(host.header.layers, host.here, strict=False))


def full_adapters(world: World) -> list[Adapter]:
    """Those with bytes in every layer."""
    return [a for a in world.adapters if all(block.size for block in read_header(world.objects, a.artifact).layers)]


def sums(prefetcher: Prefetcher) -> tuple[int, int, int]:
    record = prefetcher.record
    return record.useful_bytes, record.late_bytes, record.wasted_bytes


def world_size(store: AdapterStore, adapter: Adapter) -> int:
    """Bytes of host memory that the adapter takes."""
    header = read_header(store.loader.store, adapter.artifact)
    return lay_out(header, store.base, store.pool.data.element_size(), store.pool.page_units).size


def assert_nothing_held(store: AdapterStore, prefetcher: Prefetcher) -> None:
    hosts = store.hosts
    until(store, lambda: not (hosts._fetching or hosts._measuring or hosts._leaving or store.loads._entries))
    assert (prefetcher.underway, list(hosts._waiters.all()), store.leases) == (0, [], 0)
    assert check_memory(store) == []
    for digest in list(store.device):
        assert store.discard(digest)
    for host in list(hosts.all()):
        hosts.forget(host)
    assert (hosts.used, store.pool.free_bytes) == (0, store.pool.size)


def call(store: AdapterStore, prefetcher: Prefetcher, adapter: Adapter) -> None:
    """As a request that comes to the engine."""
    store.announce(adapter)
    prefetcher.record_call(adapter.digest)


def bring(store: AdapterStore, *adapters: Adapter) -> None:
    """To the device, idle there; the prefetcher has seen no call."""
    for adapter in adapters:
        store.release(loaded_lease(store, adapter), [])


def begin_predicted_copy(store: AdapterStore, prefetcher: Prefetcher, stile: Stile, adapter: Adapter) -> CountedLink:
    """Returns the link to the device, on which the first layer of a prefetched adapter is."""
    link = CountedLink()
    store.loader.device_link = link  # type: ignore[assignment]
    stile.open_all()
    prefetcher.want(wanted(want(adapter)))
    poll_until(store, prefetcher, lambda: link.waiting == 1)
    return link
