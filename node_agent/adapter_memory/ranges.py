"""Planning of the ranged reads of an adapter's layers from the store, and buffers for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from adapters.artifact import LayerBlock
from adapters.errors import StoreUnavailable
from adapters.store import Arrived, ObjectStore

LARGEST_RANGE = 8 << 20
"""Maximum bytes of a range. Few large reads are fastest, since each has a fixed cost. A larger layer is read in
pieces."""
FIRST_RANGE = 1 << 20
"""Bytes of the first range, which is small so that layer 0 does not wait for many others. Each later range may be twice
as large as the one before. Before the header is known, this number of bytes is read from the artifact's start."""
MAX_SILENCE_S = 10.0
"""Seconds without a new byte after which reading an artifact's first bytes fails and is tried again."""


@dataclass
class Range:
    """Layers first..end-1, which are bytes start..start+size-1 of the artifact."""

    first: int
    end: int
    start: int
    size: int
    tries: int = 0
    not_before: float = 0.0
    """earliest time of the next attempt, in monotonic seconds"""


class FirstBytes:
    """Reads an artifact's header and, concurrently, the bytes after it, which contain its first layers.

    Later ranges can be requested as soon as the header is known, while these bytes are still arriving. A distant store
    thus costs one round trip, not one for the header and one for the layers.
    """

    def __init__(self, store: ObjectStore, submit: Callable[..., Future[int]]) -> None:
        """`submit` runs a function in a thread, like Executor.submit."""
        self._store, self._submit = store, submit
        self.data = memoryview(bytearray(FIRST_RANGE))
        """First bytes of the artifact; valid up to the count that `read` has reported."""
        self._changed = threading.Condition()
        self._head = self._count = 0
        """Number of bytes read with the header, and number of valid bytes in `data`. Valid bytes are never
        rewritten."""
        self._rest: Future[int] | None = None

    @property
    def size(self) -> int:
        """Bytes from the artifact's start that `read` provides, if the artifact is that long."""
        return self._head if self._rest is None else FIRST_RANGE

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Reads a range like a store. A read at offset 0 also starts to read the bytes after it."""
        if start:
            return self._store.get_range(key, start, length)
        rest = self._submit(self._read_behind, key, length) if length < FIRST_RANGE else None
        head = self._store.get_range(key, 0, length)
        with self._changed:
            self._head = min(len(head), FIRST_RANGE)
            self.data[: self._head] = head[: self._head]
            self._count = max(self._count, self._head)
        if rest is not None and len(head) == length:  # otherwise the artifact ends there
            self._rest = rest
            rest.add_done_callback(self._wake)
        return head

    def read(self, arrived: Arrived) -> int:
        """Waits for the first bytes, and calls `arrived` with their number as it grows. Returns the final number.

        Raises errors of the read and of `arrived`, and StoreUnavailable after MAX_SILENCE_S seconds without a byte.
        """
        count = -1
        while True:
            with self._changed:
                ended = self._rest is None or self._rest.done()
                if count == self._count and not ended and not self._changed.wait(MAX_SILENCE_S):
                    raise StoreUnavailable(f"no byte after an artifact's header arrived for {MAX_SILENCE_S:g} s")
                more, count = self._count > count, self._count
            if more:
                arrived(count)
            elif ended:
                break
        if self._rest is not None:
            self._rest.result()
        return count

    def _read_behind(self, key: str, start: int) -> int:
        """Reads the bytes from `start` to FIRST_RANGE. They are copied to `data` after they arrive, since a retried
        read rewrites its buffer."""
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
    """Returns ranges that cover all non-empty layers, in order. A range has at most LARGEST_RANGE bytes, unless it is a
    single layer. Layers within the artifact's first `have` bytes get separate ranges."""
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
    """Reusable buffer per loader thread, of at most LARGEST_RANGE bytes. Larger requests get a new buffer."""

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, size: int) -> memoryview:
        """Returns a buffer of `size` bytes for the calling thread, valid until its next call."""
        if size > LARGEST_RANGE:
            return memoryview(bytearray(size))
        if len(getattr(self._local, "buffer", b"")) < size:
            self._local.buffer = bytearray(size)
        return memoryview(self._local.buffer)[:size]
