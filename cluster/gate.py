"""A gate that many pass at once, and that can be closed for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Whoever passes or closes it must end in bounded time: all others wait for that."""

    def __init__(self) -> None:
        self._passing = 0
        self._empty, self._open = asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._open.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._passing += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._passing -= 1
            if not self._passing:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Closes the gate: nobody passes while the context lasts. One may close it at a time."""
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()
