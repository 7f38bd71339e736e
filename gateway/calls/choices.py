"""Several generations of one call as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from cluster.errors import ServiceError
from cluster.messages import Done, Token, TokenLogprob
from gateway.calls.admission import admitted
from gateway.calls.dispatch import Generation

QUEUE = 64
"""Events that wait for a slow reader; then the generations wait too."""

Item = tuple[int, Token | Done]


class Outcome(msgspec.Struct):
    """A generation at its end."""

    text: str
    logprobs: list[TokenLogprob]
    done: Done
    prompt_logprobs: list[TokenLogprob] = []
    """Of the prompt's tokens but the first, where they were asked for."""


async def collect(generations: Sequence[Generation]) -> list[Outcome]:
    """Run all to their ends. Raises the first ServiceError, and cancels the others."""
    pieces: list[list[str]] = [[] for _ in generations]
    logprobs: list[list[TokenLogprob]] = [[] for _ in generations]
    ends: dict[int, Done] = {}
    async with aclosing(merged(generations)) as items:
        async for index, event in items:
            pieces[index].append(event.text)
            if isinstance(event, Done):
                ends[index] = event
            else:
                logprobs[index] += event.logprobs
    if len(ends) != len(generations):
        raise ServiceError("node_failed", "the node ended without an outcome")
    return [
        Outcome("".join(pieces[index]), logprobs[index], ends[index], generation.prompt_logprobs)
        for index, generation in enumerate(generations)
    ]


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[Item, None]:
    """(choice, event) as they come, once the call is admitted. Raises the first ServiceError, and ends the others."""
    shared, call = generations[0].shared, generations[0].invocation.call

    def used() -> int:
        return sum(generation.used_tokens for generation in generations)

    async with admitted(call, shared.limits, shared.metrics, used), aclosing(_begun(generations)) as items:
        async for item in items:
            yield item


async def _begun(generations: Sequence[Generation]) -> AsyncGenerator[Item, None]:
    if len(generations) == 1:
        async with aclosing(generations[0].events()) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(QUEUE)
    tasks = [asyncio.ensure_future(_pump(index, generation, queue)) for index, generation in enumerate(generations)]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(index: int, generation: Generation, queue: asyncio.Queue[Item | Exception | None]) -> None:
    try:
        async with aclosing(generation.events()) as events:
            async for event in events:
                await queue.put((index, event))
    except Exception as error:  # handed to the reader, which raises it
        await queue.put(error)
    else:
        await queue.put(None)
