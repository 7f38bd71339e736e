"""Leases: of several processes that could do a thing, one may, for as long as it prolongs its lease.

A lease that is not prolonged ends by itself. Its holder counts the time from before it asked, so that it stops sooner
than anyone else can begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from cluster.redis_link import RedisLink


class Lease(msgspec.Struct, frozen=True):
    holder: str
    """Empty: nobody."""
    seconds: float
    """Time until it ends by itself."""


NOBODY = Lease("", 0.0)


class Leases(Protocol):
    """Leases that all gateway workers share. Every method may raise RedisAway."""

    async def take(self, name: str, holder: str, seconds: float) -> Lease:
        """Takes the lease, or prolongs it, for `seconds` from now. Another holder's lease, while it lasts, is left as
        it is and returned."""
        ...

    async def free(self, name: str, holder: str) -> None:
        """Frees the lease; does nothing when it is another's."""
        ...

    async def get(self, name: str) -> Lease:
        """Returns the lease as it is now; NOBODY when nobody holds it."""
        ...


class MemoryLeases:
    """The leases of one gateway process, gone with it. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[str, tuple[str, float]] = {}

    async def take(self, name: str, holder: str, seconds: float) -> Lease:
        current = await self.get(name)
        if current.holder not in ("", holder):
            return current
        self._leases[name] = holder, self._clock() + seconds
        return Lease(holder, seconds)

    async def free(self, name: str, holder: str) -> None:
        if (await self.get(name)).holder == holder:
            del self._leases[name]

    async def get(self, name: str) -> Lease:
        holder, end = self._leases.get(name, ("", -math.inf))
        remaining = end - self._clock()
        return Lease(holder, remaining) if remaining > 0 else NOBODY


class RedisLeases:
    """Leases that all gateway workers share in Redis; they expire by Redis's clock."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link

    async def take(self, name: str, holder: str, seconds: float) -> Lease:
        return await self._run("take", name, holder, seconds)

    async def free(self, name: str, holder: str) -> None:
        await self._run("free", name, holder)

    async def get(self, name: str) -> Lease:
        return await self._run("look", name)

    async def _run(self, action: str, name: str, holder: str = "", seconds: float = 0.0) -> Lease:
        current_holder, remaining_ms = await self._link.run(
            "lease", [self._link.key("lease", name)], [action, holder, round(seconds * 1000)]
        )
        return Lease(current_holder.decode(), remaining_ms / 1000) if current_holder else NOBODY
