"""The invocations in progress, so that deleting a function by force can end them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import ServiceError

Owner = tuple[str, str]
"""Tenant and function."""


class Running:
    def __init__(self) -> None:
        self._revoked: dict[Owner, set[asyncio.Future[ServiceError]]] = {}

    @contextmanager
    def track(self, tenant: str, function: str) -> Iterator[asyncio.Future[ServiceError]]:
        """Yields a future that gets the reason when the invocation must end early."""
        owner = (tenant, function)
        revoked: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
        self._revoked.setdefault(owner, set()).add(revoked)
        try:
            yield revoked
        finally:
            mine = self._revoked[owner]
            mine.discard(revoked)
            if not mine:
                del self._revoked[owner]

    def revoke(self, tenant: str, function: str, reason: ServiceError) -> int:
        """How many invocations were told to end."""
        open_ones = [future for future in self._revoked.get((tenant, function), ()) if not future.done()]
        for future in open_ones:
            future.set_result(reason)
        return len(open_ones)

    def count(self) -> int:
        return sum(len(futures) for futures in self._revoked.values())
