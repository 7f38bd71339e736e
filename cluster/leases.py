"""Leases: of several processes, only the one that holds the lease of a task may do this task.

A lease that is not renewed expires. The holder measures the time from before it sends its request. It therefore stops
before another process can begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from cluster.redis_link import RedisLink


class Lease(msgspec.Struct, frozen=True):
    """State of a lease."""

    holder: str
    """Process that holds the lease; empty: nobody."""
    seconds: float
    """Seconds until the lease expires."""


NOBODY = Lease("", 0.0)


class Leases(Protocol):
    """Leases that all gateway workers share. Every method may raise RedisAway."""

    async def take(self, name: str, holder: str, seconds: float) -> Lease:
        """Acquires or renews the lease for `seconds` from now, and returns the current lease. A lease that another
        holder has is left unchanged and returned."""
        ...

    async def free(self, name: str, holder: str) -> None:
        """Releases the lease. Does nothing when another process holds it."""
        ...

    async def get(self, name: str) -> Lease:
        """Returns the current lease; NOBODY when no process holds it."""
        ...


class MemoryLeases:
    """Leases of a single gateway process, kept in memory and lost when it exits. `clock` returns monotonic seconds."""

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
