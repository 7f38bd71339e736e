"""Which ranged reads bring an adapter's layers from the store, and the memory that they are read into."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from adapters.artifact import LayerBlock
from adapters.store import ObjectStore

LARGEST_RANGE = 8 << 20
"""Bytes. Each read has its fixed cost, so few large ones are fastest; a layer that is larger is read in pieces."""
FIRST_RANGE = 1 << 20
"""Bytes of the first range, so that layer 0 does not wait for many others; each one after may be twice as large. As
many are read with the header."""


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
    """Reads an artifact's header, and with the same request its first layers: a round trip less until a prompt can be
    begun."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.data = bytearray()
        """the artifact's beginning, FIRST_RANGE bytes at most"""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if start:
            return self._store.get_range(key, start, length)
        found = self._store.get_range(key, 0, max(length, FIRST_RANGE))
        self.data = bytearray(found[:FIRST_RANGE])
        return found[:length]


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
