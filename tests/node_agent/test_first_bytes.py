"""What is behind an artifact's header is asked for at the same time as the header, and layers land as bytes come."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue

import pytest

from adapters import artifact
from adapters.artifact import FIRST_READ, encode_header, read_header
from adapters.errors import StoreUnavailable
from adapters.store import Arrived, ObjectStore
from cluster.messages import Adapter
from node_agent.adapter_memory import fetch, ranges
from node_agent.adapter_memory.ranges import FirstBytes
from node_agent.adapter_memory.store import AdapterStore
from node_agent.leases import LayerState
from tests.node_agent.adapter_world import LAYERS, Turnstile, World, assert_contents, lease, starts, until


class Reads:
    """A store of one artifact, whose reads wait until the test lets them through, or fails them.

    What is read into a buffer comes in the pieces that `counts` name; what was there before is spoilt when fewer come.
    """

    def __init__(self, data: bytes, counts: Sequence[int] = ()) -> None:
        self._data, self._counts = data, counts
        self._asked: Queue[tuple[int, Future[None]]] = Queue()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._wait(start)
        return self._data[start : start + length]

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived) -> int:
        self._wait(start)
        data = self._data[start : start + len(buffer)]
        for count in [*(c for c in self._counts if c < len(data)), len(data)]:
            buffer[:] = bytes(len(buffer))
            buffer[:count] = data[:count]
            arrived(count)
        return len(data)

    def both(self) -> tuple[Future[None], Future[None]]:
        """Waits until two reads wait, of the header and of what is behind it."""
        waiting = dict(self._asked.get(timeout=60) for _ in range(2))
        assert sorted(waiting) == [0, FIRST_READ]
        return waiting[0], waiting[FIRST_READ]

    def _wait(self, start: int) -> None:
        passes = Future[None]()
        self._asked.put((start, passes))
        passes.result(60)


@pytest.mark.parametrize("size", [FIRST_READ - 1, FIRST_READ, FIRST_READ + 1, ranges.FIRST_RANGE, 3 << 20])
@pytest.mark.parametrize("header_first", [True, False])
def test_both_are_on_their_way_at_once(size: int, header_first: bool) -> None:
    rng = random.Random(size)
    data = rng.randbytes(size)
    objects = Reads(data, [rng.randrange(ranges.FIRST_RANGE) for _ in range(5)])
    with ThreadPoolExecutor(2) as threads:
        first = FirstBytes(objects, threads.submit)  # type: ignore[arg-type]
        head = threads.submit(first.get_range, "key", 0, FIRST_READ)
        header, behind = objects.both()
        for read in (header, behind) if header_first else (behind, header):
            read.set_result(None)
        assert head.result(60) == data[:FIRST_READ]
        seen: list[int] = []

        def arrived(count: int) -> None:
            seen.append(count)
            assert first.data[:count] == data[:count]

        assert first.read(arrived) == seen[-1] == min(size, ranges.FIRST_RANGE)
        assert seen == sorted(set(seen))
        assert first.size == (ranges.FIRST_RANGE if size >= FIRST_READ else size)


def test_the_header_does_not_wait_for_what_is_behind_it() -> None:
    objects = Reads(bytes(3 << 20))
    with ThreadPoolExecutor(2) as threads:
        first = FirstBytes(objects, threads.submit)  # type: ignore[arg-type]
        head = threads.submit(first.get_range, "key", 0, FIRST_READ)
        header, behind = objects.both()
        header.set_result(None)
        assert len(head.result(60)) == FIRST_READ
        behind.set_exception(StoreUnavailable("away"))
        with pytest.raises(StoreUnavailable):
            first.read(lambda count: None)


def flip(data: bytes) -> bytes:
    return data[:100] + bytes([data[100] ^ 1]) + data[101:]


def away(_: bytes) -> bytes:
    raise StoreUnavailable("away")


@pytest.mark.parametrize("fault", [flip, away, lambda data: data[:-1]])
def test_layers_that_did_not_come_right_with_the_header_are_read_again(
    store: AdapterStore,
    turnstile: Turnstile,
    world: World,
    adapter: Adapter,
    fault: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first read ends where the header does, so that all layers lie behind it."""
    length = len(encode_header(read_header(world.objects, adapter.artifact)))
    monkeypatch.setattr(artifact, "FIRST_READ", length)
    monkeypatch.setattr(fetch, "BACK_OFF", 0.001)
    real, behind = turnstile.get_range_into, list[int]()

    def get_range_into(key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        if behind:
            return real(key, start, buffer, arrived)
        behind.append(start)
        data = fault(world.objects.get_range(key, start, len(buffer)))
        buffer[: len(data)] = data
        assert arrived is not None
        arrived(len(data))
        return len(data)

    monkeypatch.setattr(turnstile, "get_range_into", get_range_into)
    monkeypatch.setattr("tests.node_agent.adapter_world.comes_with_header", lambda start: False)
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert behind == [length]
    assert turnstile.reads == starts(world, adapter)[:1]
    assert_contents(store, world, held)
    store.release(held, [])


def test_a_read_that_fails_behind_its_last_layer_has_ended(
    store: AdapterStore, turnstile: Turnstile, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = next(a for a in world.adapters if read_header(world.objects, a.artifact).layers[-1].size)
    length = len(encode_header(read_header(world.objects, adapter.artifact)))
    monkeypatch.setattr(artifact, "FIRST_READ", length)
    reads = list[int]()

    def get_range_into(key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        reads.append(start)
        world.objects.get_range_into(key, start, buffer, arrived)
        raise StoreUnavailable("away")

    monkeypatch.setattr(turnstile, "get_range_into", get_range_into)
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    until(store, lambda: all(job.over for job in store.loader.fetching._jobs))
    assert reads == [length]
    assert_contents(store, world, held)
    store.release(held, [])


class Trickle:
    """A store from which bytes of weights come as far as the test lets them, and once begin anew."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner, self._changed, self._until = inner, threading.Condition(), 0
        self.begun_anew = False

    def let(self, until: int) -> None:
        """The artifact's bytes before this one come."""
        with self._changed:
            self._until = until
            self._changed.notify_all()

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived) -> int:
        data, come = self._inner.get_range(key, start, len(buffer)), 0
        while come < len(data):
            with self._changed:
                assert self._changed.wait_for(lambda: self._until > start + come, 60)  # noqa: B023
                count = min(len(data), self._until - start)
            if come and not self.begun_anew:
                self.begun_anew = True
                buffer[:] = bytes(len(buffer))
                arrived(0)
            buffer[:count], come = data[:count], count
            arrived(count)
        return len(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize("with_header", [True, False])
def test_layers_land_while_those_behind_them_come(
    world: World, with_header: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = max(world.adapters, key=lambda adapter: adapter.bytes)
    header = read_header(world.objects, adapter.artifact)
    if with_header:
        monkeypatch.setattr(artifact, "FIRST_READ", len(encode_header(header)))
    else:
        monkeypatch.setattr(ranges, "FIRST_RANGE", FIRST_READ)  # nothing comes with it
        monkeypatch.setattr(artifact, "FIRST_READ", len(encode_header(header)))
        monkeypatch.setattr(FirstBytes, "size", 0)
    objects = Trickle(world.objects)
    store = world.store(objects)  # type: ignore[arg-type]
    try:
        objects.let(header.layers[0].offset)
        held = lease(store, adapter)
        for layer, block in enumerate(header.layers):
            objects.let(block.offset + block.size)
            until(store, lambda at=layer: store.state(held, at) == LayerState.DEVICE)  # type: ignore[misc]
            for later in range(layer + 1, LAYERS):
                assert not header.layers[later].size or store.state(held, later) == LayerState.NO
        until(store, lambda: store.loaded(held))
        assert objects.begun_anew
        assert_contents(store, world, held)
        store.release(held, [])
    finally:
        store.close()
