"""Quota of a tenant's stored asynchronous calls, in number and bytes: those that wait, run, or have ended and are kept.

Each worker counts a tenant's records in the store now and then, and meanwhile adds those that it stores itself. So the
quota may be exceeded by what other workers store between two counts; the tenant's rates limit that. Counting happens in
the background, one page at a time. A submission waits only for the first count of its tenant, FIRST_COUNT_S at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic

from adapters.errors import StoreUnavailable
from adapters.store import MAX_LIST, ObjectStore
from adapters.tenants import Limits, Tenant
from cluster.errors import ServiceError
from gateway.catalog.threads import StoreThreads
from gateway.events.records import records_prefix

COUNTED_FOR_S = 300.0
"""Seconds for which a count is used while it has room."""
RECOUNT_S = 60.0
"""Minimum seconds between two counts of a tenant. A count of 50,000 in a directory takes about a second of processor
time."""
FIRST_COUNT_S = 5.0
COUNTED_PART = 1 / 20
"""Part of a limit after which this worker's own additions lead to a new count."""
MAX_CACHED_COUNTS = 10_000
FULL_RETRY_AFTER_S = 60.0
"""Value of Retry-After in seconds: ended calls are removed this often."""

log = logging.getLogger("gateway")

AccountOf = Callable[[str], Awaitable[Tenant]]


@dataclass
class _Count:
    """Number and bytes of a tenant's records: those of the last count, those added since (`new`), and those that are
    being written (`open`)."""

    calls: int = 0
    bytes: int = 0
    new_calls: int = 0
    new_bytes: int = 0
    open_calls: int = 0
    open_bytes: int = 0
    counted_at: float = -inf
    counting: asyncio.Task[None] | None = None

    def is_due(self, limits: Limits) -> bool:
        """Returns whether the records must be counted again."""
        age = monotonic() - self.counted_at
        grown = (
            self.new_calls >= limits.stored_calls * COUNTED_PART
            or self.new_bytes >= limits.stored_call_bytes * COUNTED_PART
        )
        return age >= COUNTED_FOR_S or (age >= RECOUNT_S and (grown or self.problem(limits, 0) is not None))

    def problem(self, limits: Limits, size: int) -> str | None:
        """Returns which limit one more record of `size` bytes would exceed; None if there is room."""
        calls = self.calls + self.new_calls + self.open_calls
        total = self.bytes + self.new_bytes + self.open_bytes
        if calls >= limits.stored_calls:
            limit = f"{limits.stored_calls} (limits.stored_calls)"
            return f"the tenant has {calls} asynchronous calls stored, and may have {limit}"
        if total + size > limits.stored_call_bytes:
            limit = f"{limits.stored_call_bytes} (limits.stored_call_bytes)"
            return f"the tenant's asynchronous calls take {total} bytes, and with {size} more would exceed {limit}"
        return None


class CallQuota:
    """Quota of all tenants, in one worker. `account_of` returns a tenant's record; it raises NotFound."""

    def __init__(self, store: ObjectStore, threads: StoreThreads, account_of: AccountOf) -> None:
        self._store, self._threads, self._account_of = store, threads, account_of
        self._counts: dict[str, _Count] = {}

    @asynccontextmanager
    async def room(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Keeps room for a record of `size` bytes while the context writes it. Without an exception the record counts
        from then on.

        Raises ServiceError `rate_limited` without room, NotFound for an unknown tenant, StoreUnavailable.
        """
        limits = (await self._account_of(tenant)).limits
        count = await self._count_of(tenant, limits)
        if (problem := count.problem(limits, size)) is not None:
            why = f"{problem}; ended ones are removed after a day, dead letters after a week"
            raise ServiceError("rate_limited", why, retry_after=FULL_RETRY_AFTER_S)
        count.open_calls += 1
        count.open_bytes += size
        try:
            yield
            count.new_calls += 1
            count.new_bytes += size
        finally:
            count.open_calls -= 1
            count.open_bytes -= size

    async def _count_of(self, tenant: str, limits: Limits) -> _Count:
        """Returns the tenant's count, after its first one if that ends in time. Begins another one if it is due."""
        if tenant not in self._counts and len(self._counts) >= MAX_CACHED_COUNTS:
            self._forget_idle()
        count = self._counts.setdefault(tenant, _Count())
        if count.counting is None and count.is_due(limits):
            count.counting = asyncio.create_task(self._recount(tenant, count, limits.stored_calls))
        if count.counted_at == -inf and count.counting is not None:
            await asyncio.wait({count.counting}, timeout=FIRST_COUNT_S)
        return count

    def _forget_idle(self) -> None:
        self._counts = {
            tenant: count for tenant, count in self._counts.items() if count.counting is not None or count.open_calls
        }

    async def _recount(self, tenant: str, count: _Count, max_calls: int) -> None:
        """Counts the tenant's records in the store, up to `max_calls`. If the store fails, the earlier count stays.

        Records that are written meanwhile may be counted twice until the next count, but none is missed.
        """
        calls = size = 0
        added, added_bytes, after = count.new_calls, count.new_bytes, ""
        prefix = records_prefix(tenant)
        try:
            while calls < max_calls and (infos := await self._threads.read(self._store.list, prefix, after, MAX_LIST)):
                calls += len(infos)
                size += sum(info.size for info in infos)
                after = infos[-1].key
            count.calls, count.bytes = calls, size
            count.new_calls -= added
            count.new_bytes -= added_bytes
            count.counted_at = monotonic()
        except StoreUnavailable as error:
            log.warning(
                "a tenant's stored calls can't be counted; the last count stays in use",
                extra={"tenant": tenant, "why": str(error)},
            )
        finally:
            count.counting = None
