"""Headers are read by priority: prefetches that hang leave threads for the calls that come."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from adapters import artifact
from adapters.artifact import encode_header, read_header
from adapters.store import Arrived, ObjectStore
from cluster.messages import Adapter
from node_agent.adapter_memory import fetch, loader, ranges
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.store import AdapterStore
from tests.node_agent.adapter_world import World, assert_contents, lease, loaded_lease, until


class Hanging:
    """The real store, in which reads of chosen objects hang until the test lets them."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner, self._hangs = inner, set[tuple[str, bool]]()
        self.go_on = threading.Event()
        self.begun: list[str] = []
        """Objects whose headers were asked for."""

    def hang(self, adapter: Adapter, *, header: bool) -> None:
        """Its header's read hangs, or else that of what is behind it."""
        self._hangs.add((adapter.artifact, header))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.begun.append(key)
        assert (key, True) not in self._hangs or self.go_on.wait(60)
        return self._inner.get_range(key, start, length)

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        if start == artifact.FIRST_READ and (key, False) in self._hangs:
            assert self.go_on.wait(60)
        return self._inner.get_range_into(key, start, buffer, arrived)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.fixture
def hanging(world: World) -> Iterator[Hanging]:
    made = Hanging(world.objects)
    yield made
    made.go_on.set()


@pytest.fixture
def slow_store(world: World, hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterStore]:
    monkeypatch.setattr(loader, "MEASURE_THREADS", 4)
    made = world.store(hanging, adapter_slots=6, adapter_memory=4 << 20)  # type: ignore[arg-type]
    yield made
    hanging.go_on.set()
    until(made, lambda: not (made.hosts._measuring or made.hosts._fetching))
    made.close()


def test_a_call_does_not_wait_for_the_headers_of_prefetches(
    world: World, hanging: Hanging, slow_store: AdapterStore
) -> None:
    """As many prefetches as there are threads, and all hang."""
    *ordered, called = world.adapters
    for adapter in ordered:
        hanging.hang(adapter, header=True)
        slow_store.announce(adapter, Priority.ORDER)
    held = loaded_lease(slow_store, called)
    assert_contents(slow_store, world, held)
    assert len([key for key in hanging.begun if key != called.artifact]) <= loader.MEASURE_AHEAD
    hanging.go_on.set()
    until(slow_store, lambda: all((host := slow_store.hosts.get(a.digest)) and host.complete for a in ordered))
    for adapter in ordered:
        slow_store.retract(adapter.digest, Priority.ORDER)
    slow_store.release(held, [])


def test_a_call_takes_over_a_header_that_is_in_line(world: World, hanging: Hanging, slow_store: AdapterStore) -> None:
    *ordered, called = world.adapters
    for adapter in ordered[: loader.MEASURE_AHEAD]:
        hanging.hang(adapter, header=True)
        slow_store.announce(adapter, Priority.ORDER)
    slow_store.announce(called, Priority.ORDER)
    until(slow_store, lambda: len(hanging.begun) == loader.MEASURE_AHEAD)
    held = loaded_lease(slow_store, called)
    for adapter in [*ordered[: loader.MEASURE_AHEAD], called]:
        slow_store.retract(adapter.digest, Priority.ORDER)
    slow_store.release(held, [])


def test_bytes_behind_a_header_that_do_not_come_are_asked_for_again(
    world: World, hanging: Hanging, slow_store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = max(world.adapters, key=lambda adapter: adapter.bytes)
    monkeypatch.setattr(artifact, "FIRST_READ", len(encode_header(read_header(world.objects, adapter.artifact))))
    monkeypatch.setattr(ranges, "MAX_SILENCE_S", 0.05)
    monkeypatch.setattr(fetch, "BACK_OFF", 0.001)
    reads = 0
    real = hanging.get_range_into

    def hangs_once(key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        nonlocal reads
        reads += 1
        if reads == 1:
            assert hanging.go_on.wait(60)
        return real(key, start, buffer, arrived)

    monkeypatch.setattr(hanging, "get_range_into", hangs_once)
    held = lease(slow_store, adapter)
    until(slow_store, lambda: slow_store.loaded(held))
    assert not hanging.go_on.is_set() and reads > 1
    assert_contents(slow_store, world, held)
    slow_store.release(held, [])
