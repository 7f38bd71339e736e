"""Which ranged reads bring an adapter's layers from the store, and the memory that they are read into."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from adapters.artifact import LayerBlock
from adapters.store import ObjectStore

LARGEST_RANGE = 8 << 20
"""Bytes. Each read has its fixed cost, so few large ones are fastest; a layer that is larger is read in pieces."""
FIRST_RANGE = 1 << 20
"""Bytes of the first range, so that layer 0 does not wait for many others; each one after may be twice as large. The
artifact's first so many are read before its header is known."""


@dataclass
class Range:
    """Layers first..end-1, which are bytes start..start+size-1 of the artifact."""

    first: int
    end: int
    start: int
    size: int
    tries: int = 0
    not_before: float = 0.0
    """monotonic seconds"""


class FirstBytes:
    """Reads an artifact's header and, at the same time, the bytes behind it, in which its first layers are.

    What the header says is to be read next is then asked for while these bytes are still on their way: a store that is
    far away costs one round trip, and not one for the header and one for the layers.
    """

    def __init__(self, store: ObjectStore, threads: Executor) -> None:
        self._store, self._threads = store, threads
        self._head = b""
        self._behind: Future[bytes] | None = None

    @property
    def size(self) -> int:
        """Bytes from the artifact's start that `take` returns, if it has as many."""
        return FIRST_RANGE if self._behind is not None else len(self._head)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """As of a store; the first bytes of an artifact begin to be read when its start is asked for."""
        if start:
            return self._store.get_range(key, start, length)
        behind = None
        if length < FIRST_RANGE:
            behind = self._threads.submit(self._store.get_range, key, length, FIRST_RANGE - length)
        self._head = self._store.get_range(key, 0, length)
        if len(self._head) == length:  # else it ends there
            self._behind = behind
        return self._head

    def take(self) -> memoryview:
        """Waits for the bytes that were asked for. Raises what reading them raised."""
        data = bytearray(self._head)
        if self._behind is not None:
            data += self._behind.result()
        return memoryview(data)


def plan_ranges(layers: Sequence[LayerBlock], have: int = 0) -> list[Range]:
    """Ranges that cover all layers which have bytes, in layer order; only a single layer may be larger than a range.

    The layers that lie in the artifact's first `have` bytes are a range of their own."""
    ranges: list[Range] = []
    for index, block in enumerate(layers):
        if not block.size:
            continue
        limit = min(LARGEST_RANGE, FIRST_RANGE << min(max(0, len(ranges) - 1), 3))
        end = block.offset + block.size
        last_is_here = bool(ranges) and ranges[-1].start + ranges[-1].size <= have
        if ranges and last_is_here == (end <= have) and end - ranges[-1].start <= limit:
            ranges[-1].end, ranges[-1].size = index + 1, end - ranges[-1].start
        else:
            ranges.append(Range(index, index + 1, block.offset, block.size))
    return ranges


class Staging:
    """A buffer per loader thread, used again and again. It grows to the largest layer there is, and only for it."""

    def __init__(self) -> None:
        self._own = threading.local()

    def take(self, size: int) -> memoryview:
        """`size` bytes that are the calling thread's until it calls again."""
        if size > LARGEST_RANGE:
            return memoryview(bytearray(size))
        if not hasattr(self._own, "buffer"):
            self._own.buffer = bytearray()
        if len(self._own.buffer) < size:
            self._own.buffer = bytearray(size)
        return memoryview(self._own.buffer)[:size]
