"""Plans the ranged reads that bring an adapter's layers from the store, and provides the memory that they are read
into."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from adapters.artifact import LayerBlock
from adapters.errors import StoreUnavailable
from adapters.store import Arrived, ObjectStore

LARGEST_RANGE = 8 << 20
"""Bytes. Each read has its fixed cost, so few large ones are fastest; a layer that is larger is read in pieces."""
FIRST_RANGE = 1 << 20
"""Bytes of the first range, so that layer 0 does not wait for many others; each one after may be twice as large. As
many bytes of the artifact's beginning are read before its header is known."""
LONGEST_SILENCE_S = 10.0
"""Seconds for which placing the artifact's first bytes waits for one more of them; then the store is asked again."""


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

    def __init__(self, store: ObjectStore, submit: Callable[..., Future[int]]) -> None:
        """`submit` has a thread call a function, as Executor.submit does."""
        self._store, self._submit = store, submit
        self.data = memoryview(bytearray(FIRST_RANGE))
        """The artifact's first bytes, as far as `read` has said that they are here."""
        self._changed = threading.Condition()
        self._head = self._count = 0
        """Bytes of the header's read, and of `data` that are here. None of these is written again."""
        self._rest: Future[int] | None = None

    @property
    def size(self) -> int:
        """The bytes from the artifact's start that `read` brings, if it has as many."""
        return self._head if self._rest is None else FIRST_RANGE

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Reads a range as a store does; the first bytes of an artifact begin to be read when its start is asked
        for."""
        if start:
            return self._store.get_range(key, start, length)
        rest = self._submit(self._read_behind, key, length) if length < FIRST_RANGE else None
        head = self._store.get_range(key, 0, length)
        with self._changed:
            self._head = min(len(head), FIRST_RANGE)
            self.data[: self._head] = head[: self._head]
            self._count = max(self._count, self._head)
        if rest is not None and len(head) == length:  # else it ends there
            self._rest = rest
            rest.add_done_callback(self._wake)
        return head

    def read(self, arrived: Arrived) -> int:
        """Calls `arrived` with how many of the artifact's first bytes are here, ever more, until all are. Returns how
        many that is. Raises what reading them raised, StoreUnavailable when none has come for LONGEST_SILENCE_S, and
        what `arrived` does."""
        count = -1
        while True:
            with self._changed:
                ended = self._rest is None or self._rest.done()
                if count == self._count and not ended and not self._changed.wait(LONGEST_SILENCE_S):
                    raise StoreUnavailable(f"no byte behind an artifact's header came for {LONGEST_SILENCE_S:g} s")
                more, count = self._count > count, self._count
            if more:
                arrived(count)
            elif ended:
                break
        if self._rest is not None:
            self._rest.result()
        return count

    def _read_behind(self, key: str, start: int) -> int:
        """Reads the bytes from `start` to FIRST_RANGE. They are copied to `data` once they are there: the read may
        begin again while they are looked at."""
        buffer = memoryview(bytearray(FIRST_RANGE - start))

        def record_arrival(count: int) -> None:
            with self._changed:
                if count and start + count > self._count:
                    low = max(0, self._count - start)
                    self.data[start + low : start + count] = buffer[low:count]
                    self._count = start + count
                    self._changed.notify_all()

        return self._store.get_range_into(key, start, buffer, record_arrival)

    def _wake(self, _: Future[int]) -> None:
        with self._changed:
            self._changed.notify_all()


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
        self._local = threading.local()

    def take(self, size: int) -> memoryview:
        """Returns `size` bytes that are the calling thread's until it calls again."""
        if size > LARGEST_RANGE:
            return memoryview(bytearray(size))
        if len(getattr(self._local, "buffer", b"")) < size:
            self._local.buffer = bytearray(size)
        return memoryview(self._local.buffer)[:size]
