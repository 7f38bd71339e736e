"""Merges the event streams of several generations, for calls with more than one choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.messages import Done, Token

QUEUE = 64
"""Maximum events that wait for a slow reader; beyond that the generations wait."""

Item = tuple[int, Token | Done]
"""Index of a generation among those of its call, and one of its events."""


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yields the items of all streams in order of arrival. Raises the first exception and ends the other streams."""
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(QUEUE)
    tasks = [asyncio.ensure_future(_pump(stream, queue)) for stream in streams]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[Item, None], queue: asyncio.Queue[Item | Exception | None]) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put(item)
    except Exception as error:  # passed to the reader, which raises it
        await queue.put(error)
    else:
        await queue.put(None)
