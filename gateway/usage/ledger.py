"""The usage sums of this gateway: meters add to them, and they are written to the journal and the registry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from adapters.errors import StoreUnavailable
from adapters.full_disk import is_full
from adapters.store import ObjectStore
from gateway.background import background
from gateway.catalog.threads import LeavableThreads
from gateway.usage.counts import UsageCounts
from gateway.usage.hours import HOUR, hour_name, hour_start
from gateway.usage.journal import UNREADABLE_JOURNAL, Journal, Line, Sums, abandoned_journals, claim_journal
from gateway.usage.objects import UsageRecord, usage_key

FLUSH_SECONDS = 10.0
STOP_SECONDS = 5.0
"""Maximum seconds of the last flush when the gateway stops. Sums that it does not write stay in the journal until the
next start."""
MAX_WRITES_A_FLUSH = 200
LATE_SECONDS = 300.0
"""Seconds from the end of an hour after which its object gets a new name with each write.

The old object may then be merged and removed at any moment. This is less than the compaction's CLOSED_SECONDS, by the
amount that this host's clock may lag behind the store's.
"""
LOG_BYTES = 1 << 20
"""Size of the log, in bytes, from which the journal starts a new segment."""

log = logging.getLogger("gateway")


class UsageLedger:
    """Usage sums of one gateway process, for use on one event loop. Created by `open_ledger`.

    `clock`: Unix time.
    """

    def __init__(self, journal: Journal, store: ObjectStore, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._store = store
        self._clock = clock
        self._threads = LeavableThreads(1)
        self._sums: dict[tuple[str, str, int], Sums] = {}
        self._open: dict[tuple[str, str], Sums] = {}
        """Sums to which calls are added, by tenant and hour."""
        self._unwritten = False
        """True if the journal lacks lines of calls that the sums include."""
        self.away = False
        """True if the latest write to the registry failed."""

    def add(self, tenant: str, function: str, version: str, counts: UsageCounts) -> None:
        """Counts a call. Once this returns, killing the process does not lose the call."""
        hour = hour_name(self._clock())
        sums = self._open.get((tenant, hour))
        if sums is None:
            sums = Sums(tenant, hour, self._journal.segment, {})
            self._keep(sums)
        line = Line(tenant, hour, sums.part, function, version, counts)
        try:
            self._journal.append(line)
        except OSError as error:
            if not self._unwritten:
                log.error(
                    "the usage journal can't be written: until it can, killing this gateway loses usage", exc_info=error
                )
            self._unwritten = True
        sums.count(function, version, counts)

    def unwritten(self, tenant: str) -> dict[str, bytes]:
        """Returns the tenant's current objects by key. The registry's copies may be older."""
        mine = [sums for sums in self._sums.values() if sums.tenant == tenant]
        return {self._key(sums): _encoded(sums) for sums in mine}

    async def flush(self) -> bool:
        """Writes up to MAX_WRITES_A_FLUSH objects with changed sums to the registry. Returns whether it has all."""
        if self._unwritten:
            await self._begin_next_segment()
        changed = [sums for sums in self._sums.values() if sums.changes != sums.flushed]
        for sums in sorted(changed, key=lambda sums: sums.hour)[:MAX_WRITES_A_FLUSH]:
            changes = sums.changes
            try:
                await self._threads.run(partial(self._store.put, self._key(sums), _encoded(sums)))
            except StoreUnavailable as error:
                if not self.away:
                    log.warning("usage stays in the journal: the registry can't be written", exc_info=error)
                self.away = True
                return False
            sums.flushed, self.away = changes, False
        if self._journal.size > LOG_BYTES or self._past():
            await self._begin_next_segment()
        return len(changed) <= MAX_WRITES_A_FLUSH

    async def run(self, seconds: float) -> None:
        """Flushes every `seconds` seconds until cancelled."""
        while True:
            await self.flush()
            await asyncio.sleep(seconds)

    async def begin(self) -> None:
        """Loads the sums that earlier processes left in the journal. Raises JournalError, OSError.

        On a disk that takes no more the journal is begun by a later flush: its files stay until that has succeeded.
        """
        for sums in await asyncio.to_thread(self._journal.read):
            self._keep(sums)
        try:
            self._journal.begin_segment()
            await asyncio.to_thread(self._journal.write_snapshot, self._journal.segment, self._snapshot())
        except OSError as error:
            if not is_full(error):
                raise
            log.error(
                "the usage journal can't be created: until it exists, killing this gateway loses usage", exc_info=error
            )
            self._unwritten = True

    def _keep(self, sums: Sums) -> None:
        self._sums[sums.key] = sums
        open_sums = self._open.get((sums.tenant, sums.hour))
        if open_sums is None or open_sums.part < sums.part:
            self._open[sums.tenant, sums.hour] = sums

    def _past(self) -> list[Sums]:
        """Returns the sums of past hours that the registry has. No call will be added to them."""
        hour = hour_name(self._clock())
        return [sums for sums in self._sums.values() if sums.hour != hour and sums.changes == sums.flushed]

    async def _begin_next_segment(self) -> None:
        """Starts a new segment of the journal, with the sums that are still needed."""
        for sums in self._past():
            del self._sums[sums.key]
            if self._open.get((sums.tenant, sums.hour)) is sums:
                del self._open[sums.tenant, sums.hour]
        try:
            # No await in between: later calls go to the new log, and earlier ones are in the snapshot.
            self._journal.begin_segment()
            data, segment = self._snapshot(), self._journal.segment
            self._unwritten = False
            await self._threads.run(partial(self._journal.write_snapshot, segment, data))
        except OSError as error:
            log.error(
                "a new segment of the usage journal can't be created; the old segment stays in use", exc_info=error
            )
            self._unwritten = True

    def _snapshot(self) -> bytes:
        return msgspec.json.encode(list(self._sums.values()))

    def _key(self, sums: Sums) -> str:
        late = self._clock() >= hour_start(sums.hour) + HOUR + LATE_SECONDS
        return usage_key(sums.tenant, sums.hour, self._journal.gateway, sums.part, sums.changes if late else None)


def _encoded(sums: Sums) -> bytes:
    return msgspec.json.encode(UsageRecord(functions=sums.functions))


@asynccontextmanager
async def open_ledger(
    folder: Path,
    store: ObjectStore,
    *,
    clock: Callable[[], float] = time.time,
    seconds: float = FLUSH_SECONDS,
) -> AsyncIterator[UsageLedger]:
    """Yields this process's ledger, which flushes every `seconds` seconds. At the end it flushes once more.

    Raises JournalError, OSError.
    """
    journal = await asyncio.to_thread(claim_journal, folder)
    try:
        ledger = UsageLedger(journal, store, clock)
        await ledger.begin()
        try:
            async with background(partial(_take_over, folder, store), partial(ledger.run, seconds)):
                yield ledger
        finally:
            await _last_flush(ledger)
    finally:
        journal.close()


async def _take_over(folder: Path, store: ObjectStore) -> None:
    """Writes to the registry what exited processes left in their journals. What can't be written stays there."""
    for journal in await asyncio.to_thread(lambda: list(abandoned_journals(folder))):
        try:
            ledger = UsageLedger(journal, store, time.time)
            await ledger.begin()
            await _last_flush(ledger)
        except Exception as error:  # any error: the other journals are still written
            log.error(UNREADABLE_JOURNAL, exc_info=error)
        finally:
            journal.close()


async def _last_flush(ledger: UsageLedger) -> None:
    try:
        async with asyncio.timeout(STOP_SECONDS):
            while not await ledger.flush() and not ledger.away:
                pass
    except TimeoutError:
        log.warning("usage stays in the journal: it was not written to the registry in time")
