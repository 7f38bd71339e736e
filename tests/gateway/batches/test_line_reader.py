"""Lines of a batch's file, read in blocks: against the plain lines, in drawn files and orders."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.errors import StoreUnavailable
from gateway.batches import line_reader
from gateway.batches.line_reader import AHEAD_LINES, GAP_BYTES, MAX_CACHED_BYTES, MAX_READ_BYTES, LineReader
from gateway.batches.lines import LineScanner
from gateway.catalog.threads import LeavableThreads

URL = "/v1/completions"


class Source:
    """A file with calls of these sizes; notes what is read of it."""

    def __init__(self, sizes: list[int]) -> None:
        bodies = [{"model": "f", "prompt": "x" * size} for size in sizes]
        calls = [{"custom_id": str(n), "method": "POST", "url": URL, "body": body} for n, body in enumerate(bodies)]
        self.content = b"".join(json.dumps(call).encode() + b"\n" for call in calls)
        self.scanned = LineScanner(URL)
        self.scanned.feed(self.content)
        self.scanned.end()
        self.reads: list[tuple[int, int]] = []
        self.fails = 0

    def read(self, start: int, length: int) -> bytes:
        self.reads.append((start, length))
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("away")
        return self.content[start : start + length]

    def reader(self) -> LineReader:
        return LineReader(self.scanned, self.read, LeavableThreads(4))


@given(
    sizes=st.lists(st.sampled_from([1, 50, 3000, GAP_BYTES + 1, 300_000]), min_size=1, max_size=30),
    seed=st.integers(0, 999),
    at_once=st.integers(1, 8),
    fails=st.integers(0, 2),
)
def test_lines_are_those_of_the_file(sizes: list[int], seed: int, at_once: int, fails: int) -> None:
    """Each asked for in any order, several at once, some of them cancelled and asked for again; reads may fail."""
    source, rng = Source(sizes), random.Random(seed)
    source.fails = fails
    order = rng.sample(range(len(sizes)), len(sizes))

    async def main() -> None:
        reader, got = source.reader(), dict[int, str]()

        async def one(place: int) -> None:
            for _ in range(4):
                asking = asyncio.ensure_future(reader.line(order[place], order[place + 1 :]))
                if rng.random() < 0.2:
                    await asyncio.sleep(0)
                    asking.cancel()
                try:
                    got[order[place]] = (await asking).custom_id
                    return
                except (StoreUnavailable, asyncio.CancelledError):
                    continue

        for first in range(0, len(order), at_once):
            await asyncio.gather(*map(one, range(first, min(first + at_once, len(order)))))
            assert sum(map(len, reader._lines.values())) <= MAX_CACHED_BYTES + MAX_READ_BYTES
        assert {index: str(index) for index in got} == got
        assert len(got) >= len(order) - 1 - fails

    asyncio.run(main())
    longest = max(source.scanned.sizes)
    assert max(length for _, length in source.reads) <= max(MAX_READ_BYTES, longest)


def test_a_file_in_order_takes_a_request_for_many_lines() -> None:
    source = Source([50] * 4000)

    async def main() -> None:
        reader = source.reader()
        for index in range(4000):
            ahead = range(index + 1, min(index + 1 + 2 * AHEAD_LINES, 4000))
            assert (await reader.line(index, ahead)).custom_id == str(index)

    asyncio.run(main())
    assert len(source.reads) <= 4000 // AHEAD_LINES + 1
    assert sum(length for _, length in source.reads) <= len(source.content)


def test_calls_that_lie_far_apart_are_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "GAP_BYTES", 100)
    source = Source([50, 200] * 20)

    async def main() -> None:
        reader = source.reader()
        for index in range(0, 40, 2):
            await reader.line(index, range(index + 2, 40, 2))

    asyncio.run(main())
    assert [length for _, length in source.reads] == [source.scanned.sizes[index] for index in range(0, 40, 2)]
