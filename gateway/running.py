"""The generations in progress: their number is bounded where a function says so, and a forced delete can end them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.errors import ServiceError

Owner = tuple[str, str]
"""Tenant and function."""
MAX_REVOCATIONS = 10_000
"""Remembered for calls that were on their way here; the oldest is forgotten."""
RETRY_AFTER = 1.0


class Running:
    def __init__(self) -> None:
        self._revoked: dict[Owner, set[asyncio.Future[ServiceError]]] = {}
        self._revocations: OrderedDict[Owner, tuple[float, ServiceError]] = OrderedDict()

    @contextmanager
    def track(
        self, tenant: str, function: str, received: float, limit: int | None = None
    ) -> Iterator[asyncio.Future[ServiceError]]:
        """Yields a future that gets the reason when the generation must end early.

        Raises ServiceError: `rate_limited` while `limit` generations of the function run in this process, the reason
        itself when the call was `received` (monotonic seconds) before the function was revoked.
        """
        owner = (tenant, function)
        since, reason = self._revocations.get(owner, (received, None))
        if reason is not None and received <= since:
            raise reason
        if limit is not None and len(self._revoked.get(owner, ())) >= limit:
            raise ServiceError(
                "rate_limited",
                f"function {function} runs {limit} generations already, its max_concurrency",
                retry_after=RETRY_AFTER,
            )
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
        """How many generations were told to end. Calls received until now that come here later are told, too."""
        self._revocations[tenant, function] = (time.monotonic(), reason)
        self._revocations.move_to_end((tenant, function))
        if len(self._revocations) > MAX_REVOCATIONS:
            self._revocations.popitem(last=False)
        open_ones = [future for future in self._revoked.get((tenant, function), ()) if not future.done()]
        for future in open_ones:
            future.set_result(reason)
        return len(open_ones)

    def count(self) -> int:
        return sum(len(futures) for futures in self._revoked.values())
