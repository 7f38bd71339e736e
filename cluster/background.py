"""Work that goes on beside a context, and ends with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger("cluster")


@asynccontextmanager
async def in_background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs each work in a task of its own; at the end of the context it is cancelled, and has ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("work in the background had failed", exc_info=outcome)
