"""Runs background tasks, and logs their failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager

RESTART_PAUSE_S = 1.0

log = logging.getLogger("gateway")


@asynccontextmanager
async def background(*works: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Runs each of the tasks as long as the context lasts. A task that raises is logged and restarted.

    So a task must be safe to restart, and must handle expected errors itself.
    """
    tasks = [asyncio.create_task(_restarted(work)) for work in works]
    try:
        yield
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels the tasks, and waits until each has ended, whether by the cancellation or otherwise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _restarted(work: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            return await work()
        except Exception:  # any error: no other task does this work
            log.exception("a background task failed; it is started again")
        await asyncio.sleep(RESTART_PAUSE_S)
