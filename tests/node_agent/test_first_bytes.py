"""What is behind an artifact's header is asked for at the same time as the header."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Queue

import pytest

from adapters import artifact
from adapters.artifact import FIRST_READ, encode_header, read_header
from adapters.errors import StoreUnavailable
from cluster.messages import Adapter
from node_agent.adapter_memory import fetch, ranges
from node_agent.adapter_memory.ranges import FirstBytes
from node_agent.adapter_memory.store import AdapterStore
from tests.node_agent.adapter_world import Turnstile, World, assert_contents, lease, starts, until


class Reads:
    """A store of one artifact, whose reads wait until the test lets them through, or fails them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._asked: Queue[tuple[int, Future[None]]] = Queue()

    def get_range(self, key: str, start: int, length: int) -> bytes:
        passes = Future[None]()
        self._asked.put((start, passes))
        passes.result(60)
        return self._data[start : start + length]

    def both(self) -> tuple[Future[None], Future[None]]:
        """Waits until two reads wait, of the header and of what is behind it."""
        waiting = dict(self._asked.get(timeout=60) for _ in range(2))
        assert sorted(waiting) == [0, FIRST_READ]
        return waiting[0], waiting[FIRST_READ]


@pytest.mark.parametrize("size", [FIRST_READ - 1, FIRST_READ, FIRST_READ + 1, ranges.FIRST_RANGE, 3 << 20])
@pytest.mark.parametrize("header_first", [True, False])
def test_both_are_on_their_way_at_once(size: int, header_first: bool) -> None:
    data = random.Random(size).randbytes(size)
    objects = Reads(data)
    with ThreadPoolExecutor(2) as threads:
        first = FirstBytes(objects, threads)  # type: ignore[arg-type]
        head = threads.submit(first.get_range, "key", 0, FIRST_READ)
        header, behind = objects.both()
        for read in (header, behind) if header_first else (behind, header):
            read.set_result(None)
        assert head.result(60) == data[:FIRST_READ]
        assert first.take() == data[: ranges.FIRST_RANGE]
        assert first.size == (ranges.FIRST_RANGE if size >= FIRST_READ else size)


def test_the_header_does_not_wait_for_what_is_behind_it() -> None:
    objects = Reads(bytes(3 << 20))
    with ThreadPoolExecutor(2) as threads:
        first = FirstBytes(objects, threads)  # type: ignore[arg-type]
        head = threads.submit(first.get_range, "key", 0, FIRST_READ)
        header, behind = objects.both()
        header.set_result(None)
        assert len(head.result(60)) == FIRST_READ
        behind.set_exception(StoreUnavailable("away"))
        with pytest.raises(StoreUnavailable):
            first.take()


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
    real, behind = turnstile.get_range, list[int]()

    def get_range(key: str, start: int, length: int) -> bytes:
        found = real(key, start, length)
        if not start:
            return found
        behind.append(start)
        return fault(found)

    monkeypatch.setattr(turnstile, "get_range", get_range)
    turnstile.open_all()
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert behind == [length]
    assert turnstile.reads == starts(world, adapter)[:1]
    assert_contents(store, world, held)
    store.release(held, [])
