"""Reads the lines of calls before they run; adjacent lines are read in one request to the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice

from gateway.batches.lines import Line, LineScanner, read_line
from gateway.catalog.threads import LeavableThreads

AHEAD_LINES = 256
"""Number of next calls whose lines may be read together with the requested line."""
GAP_BYTES = 32 << 10
"""Maximum bytes between lines that are read together; reading them is faster than another request."""
MAX_READ_BYTES = 1 << 20
MAX_CACHED_BYTES = 4 << 20

Span = dict[int, bytes]
"""Lines that were read together, by index of their calls."""


class LineReader:
    """Line reader of one batch. `read(start, length)` returns bytes of the input file and blocks."""

    def __init__(self, scanned: LineScanner, read: Callable[[int, int], bytes], threads: LeavableThreads) -> None:
        self._starts, self._sizes = scanned.starts, scanned.sizes
        self._read, self._threads = read, threads
        self._lines: Span = {}
        self._coming: dict[int, asyncio.Task[Span]] = {}
        """Reads in progress, by index of the calls whose lines they return."""

    async def line(self, index: int, ahead: Iterable[int]) -> Line:
        """Returns the call's line. `ahead`: the next calls, of which the first AHEAD_LINES may be read as well.

        Raises NotFound if the file was deleted, StoreUnavailable.
        """
        text = self._lines.pop(index, None)
        if text is None:
            task = self._coming.get(index) or self._begin(self._neighbours(index, ahead))
            text = (await asyncio.shield(task))[index]  # other calls wait for it as well
            self._lines.pop(index, None)
        return read_line(text)

    def _neighbours(self, index: int, ahead: Iterable[int]) -> list[int]:
        """Returns the calls, including `index`, whose lines are read together, in the file's order."""
        read_before = self._lines.keys() | self._coming.keys()
        calls = sorted({index, *islice(ahead, AHEAD_LINES)} - read_before, key=self._starts.__getitem__)
        max_bytes = min(MAX_READ_BYTES, MAX_CACHED_BYTES - sum(map(len, self._lines.values())))
        first = last = calls.index(index)

        def joins(before: int, after: int, begin: int, end: int) -> bool:
            gap = self._starts[calls[after]] - self._end(calls[before])
            return gap <= GAP_BYTES and self._end(calls[end]) - self._starts[calls[begin]] <= max_bytes

        while first > 0 and joins(first - 1, first, first - 1, last):
            first -= 1
        while last + 1 < len(calls) and joins(last, last + 1, first, last + 1):
            last += 1
        return calls[first : last + 1]

    def _begin(self, calls: list[int]) -> asyncio.Task[Span]:
        task = asyncio.create_task(self._read_span(calls))
        self._coming.update(dict.fromkeys(calls, task))

        def end(_: asyncio.Task[Span]) -> None:
            for call in calls:
                del self._coming[call]
            if not task.cancelled() and task.exception() is None:
                self._lines.update(task.result())

        task.add_done_callback(end)
        return task

    async def _read_span(self, calls: list[int]) -> Span:
        start = self._starts[calls[0]]
        data = await self._threads.run(partial(self._read, start, self._end(calls[-1]) - start))
        return {call: data[self._starts[call] - start : self._end(call) - start] for call in calls}

    def _end(self, call: int) -> int:
        return self._starts[call] + self._sizes[call]
