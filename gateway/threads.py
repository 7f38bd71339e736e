"""Blocking registry calls, kept off the event loop in bounded threads for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread

from adapters.errors import StoreUnavailable

P = ParamSpec("P")
T = TypeVar("T")

READ_THREADS = 16
WRITE_THREADS = 4


class StoreThreads:
    """Reads are given up after `seconds`; writes run to their end, because half of one can't be taken back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reads = anyio.CapacityLimiter(READ_THREADS)
        self._writes = anyio.CapacityLimiter(WRITE_THREADS)

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Raises StoreUnavailable when the store (or a free thread) does not answer in time."""
        work = partial(call, *args, **kwargs)
        try:
            async with asyncio.timeout(self._seconds):
                return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._reads)
        except TimeoutError:
            raise StoreUnavailable(f"no answer from the registry within {self._seconds:g} s") from None

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Not abandoned when the caller goes: what the thread uses (temporary files) must outlive it."""
        return await anyio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=self._writes)
