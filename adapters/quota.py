"""Limits on the number and size of a tenant's adapters, enforced by all gateways together.

Only the adapters of tenants with such a limit are counted. `Tenant.held` is an upper bound, which every deploy raises
by compare-and-swap before it writes anything. Racing deploys thus can't exceed the limit together, and a deploy need
not read all functions. If a deploy dies, or its outcome is unknown, the bound stays too high, but is never too low.
When the bound would refuse a deploy and may be too high, the functions are counted again.

A hold is the quota that one deploy has reserved. A version is listed when the deploy writes it to the function's
record. A count ends the holds of deploys that have lasted longer than HOLD_SECONDS. Such a deploy may not be dead but
only paused, just before it lists its version. It must not list a version that the count missed. The count therefore
first marks the hold as ended, then rewrites the function's record, and only then counts the listed versions and drops
the hold. The deploy reads the function's record, checks its hold, and then replaces the record by compare-and-swap. So
there are three cases. The deploy sees that its hold has ended, and reserves again. Or the replacement fails, because
the record has changed. Or the version was listed before the count, which includes it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from adapters.errors import AdapterError, Conflict, PreconditionFailed, StoreUnavailable
from adapters.functions import FunctionRecord
from adapters.names import is_name
from adapters.quota_usage import (
    Freed,
    check_room,
    ending,
    given_back,
    may_be_high,
    must_count,
    recounted,
    settled,
    stale,
)
from adapters.records import find_record, read_record, read_records, update_record
from adapters.standing import function_key
from adapters.store import MAX_LIST, ObjectStore
from adapters.tenants import Hold, QuotaUsage, Tenant, tenant_key, unknown

RECOUNTS = 10


class Quota:
    """Reserves and counts tenants' adapters against their limits. Methods block. `clock` returns Unix time by the
    store's clock, the same for all gateways."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] | None = None) -> None:
        self._store = store
        self._clock = clock or store.now

    @contextmanager
    def deploying(self, tenant: str, function: str) -> Iterator[QuotaReservation]:
        """Context of a deploy, which yields its reservation. Without `commit` it is released at the end.

        Call `take` before anything is stored, `confirm` before the version is listed, and `commit` afterwards.
        """
        room = QuotaReservation(self, tenant, function)
        try:
            yield room
        except BaseException as error:
            # A version that may be listed keeps its room until the next count. A conflict is raised before the write.
            if not room.may_be_listed or isinstance(error, Conflict):
                room.drop()
            raise
        else:
            room.drop()

    @contextmanager
    def removing(self, tenant: str) -> Iterator[Freed]:
        """Context of a removal: at its end, releases the quota of the removed versions, which the caller sets in
        `Freed`."""
        record = self._read(tenant)
        before = record.held if record else None
        freed = Freed()
        yield freed
        if before is not None and freed.adapters:
            # The removal is done; without this the bound is merely too high.
            with suppress(StoreUnavailable):
                self._change(tenant, lambda current: given_back(current, freed, before=before))

    def take(self, tenant: str, function: str, size: int) -> str | None:
        """Reserves quota for one version of `size` bytes. Returns the id of the hold; None for a tenant without such a
        limit.

        Raises Conflict at the limit, NotFound for a deleted tenant, or StoreUnavailable.
        """
        record = self.check(tenant)
        if record is None or record.held is None:
            return None
        if must_count(record.held, self._clock()) and not self._count(tenant):
            raise StoreUnavailable(f"the adapters of tenant {tenant} change too often to be counted")
        try:
            return self._reserve(tenant, function, size)
        except Conflict:
            record = self._read(tenant)
            if record is None or record.held is None or not may_be_high(record.held, self._clock()):
                raise
            self._count(tenant)
            return self._reserve(tenant, function, size)

    def check(self, tenant: str) -> Tenant | None:
        """Returns the tenant's record; None if it has none. Raises NotFound for a deleted tenant."""
        record = self._read(tenant)
        if record is not None and record.deleted:
            raise unknown(tenant)
        return record

    def is_open(self, tenant: str, hold: str) -> bool:
        """Returns whether no count has ended the hold. Raises NotFound for a deleted tenant."""
        record = self.check(tenant)
        if record is None or record.held is None or hold not in record.held.holds:
            return False
        return not record.held.holds[hold].ended

    def settle(self, tenant: str, hold: str, stored_bytes: int | None) -> None:
        """Ends a hold. `stored_bytes` is the size of the version that is now listed; None: no version."""
        self._change(tenant, lambda usage: settled(usage, hold, stored_bytes))

    def _reserve(self, tenant: str, function: str, size: int) -> str:
        hold = secrets.token_hex(8)

        def reserve(record: Tenant | None) -> Tenant:
            if record is None or record.deleted:
                raise unknown(tenant)
            if record.held is None:
                return record
            check_room(record.limits, record.held, size)
            holds = record.held.holds | {hold: Hold(bytes=size, when=self._clock(), function=function)}
            return msgspec.structs.replace(record, held=msgspec.structs.replace(record.held, holds=holds))

        update_record(self._store, tenant_key(tenant), Tenant, reserve)
        return hold

    def _change(self, tenant: str, change: Callable[[QuotaUsage], QuotaUsage]) -> None:
        def apply(record: Tenant | None) -> Tenant:
            if record is None or record.held is None:
                raise _NoChange
            return msgspec.structs.replace(record, held=change(record.held))

        with suppress(_NoChange):
            update_record(self._store, tenant_key(tenant), Tenant, apply)

    def _count(self, tenant: str) -> bool:
        """Recounts the tenant's listed versions, and stores the sums. Returns False when other writers changed the
        record during every attempt."""
        epoch: int | None = None
        for _ in range(RECOUNTS):
            stored = read_record(self._store, tenant_key(tenant), Tenant)
            usage = stored[0].held if stored else None
            if stored is None or usage is None or (epoch is not None and usage.epoch > epoch):
                return True  # nothing left to count, or another process has just counted
            epoch = usage.epoch
            try:
                self._recount(tenant, *stored, usage)
            except PreconditionFailed:
                continue
            return True
        return False

    def _recount(self, tenant: str, record: Tenant, etag: str, usage: QuotaUsage) -> None:
        """Ends stale holds, counts, and replaces the record. Raises PreconditionFailed if another writer changed it."""
        key = tenant_key(tenant)

        def replace(usage: QuotaUsage, etag: str) -> str:
            data = msgspec.json.encode(msgspec.structs.replace(record, held=usage))
            return self._store.put_if_match(key, data, etag)

        ended = stale(usage, self._clock())
        if not all(hold.ended for hold in ended.values()):
            usage = ending(usage, ended)
            etag = replace(usage, etag)
        for function in sorted({hold.function for hold in ended.values()}):
            self._fence(tenant, function)
        replace(recounted(usage, self._functions(tenant), self._clock()), etag)

    def _fence(self, tenant: str, function: str) -> None:
        """Rewrites the function's record, so that a deploy that has read it can't replace it any more. A function
        without a record gets a tombstone."""

        def fence(record: FunctionRecord | None) -> FunctionRecord:
            record = record or FunctionRecord(name=function, created=self._clock(), deleted=True)
            return msgspec.structs.replace(record, fences=record.fences + 1)

        update_record(self._store, function_key(tenant, function), FunctionRecord, fence, keeps_unknown=True)

    def _functions(self, tenant: str) -> Iterator[FunctionRecord]:
        folder, after = f"tenants/{tenant}/functions/", ""
        while names := self._store.folders(folder, after, MAX_LIST):
            keys = [f"{folder}{name}/function.json" for name in names]
            yield from (record for record in read_records(self._store, keys, FunctionRecord) if record is not None)
            after = names[-1]

    def _read(self, tenant: str) -> Tenant | None:
        if not is_name(tenant):  # no tenant can have this name
            return None
        return find_record(self._store, tenant_key(tenant), Tenant)


class QuotaReservation:
    """Quota reserved by one deploy."""

    def __init__(self, quota: Quota, tenant: str, function: str) -> None:
        self._quota = quota
        self._tenant = tenant
        self._function = function
        self._hold: str | None = None
        self._size = 0
        self.may_be_listed = False
        """True if the version may be listed. The deploy sets it before it writes the function's record, and resets it
        when it knows that the write has failed."""

    @property
    def hold(self) -> str:
        """Id of the hold, which the entry of the listed version names; "" for a tenant without such a limit."""
        return self._hold or ""

    def take(self, size: int) -> None:
        """Reserves quota for a version of `size` bytes, before it is stored. Later attempts of the same deploy keep the
        first reservation.

        Raises what `Quota.take` raises.
        """
        if self._hold is None:
            self._hold, self._size = self._quota.take(self._tenant, self._function, size), size

    def confirm(self) -> None:
        """Reserves quota again if a count has ended the reservation, or if the tenant has got its limit since. Call it
        between reading the function's record and replacing it.

        Raises what `Quota.take` raises.
        """
        if self._hold is None or not self._quota.is_open(self._tenant, self._hold):
            self._hold = None
            self.take(self._size)

    def commit(self) -> None:
        """Turns the reservation into used quota, since the version is listed."""
        self._settle(self._size)

    def drop(self) -> None:
        """Releases the reservation, since no version was made. Has no effect after `commit`."""
        self._settle(None)

    def _settle(self, stored_bytes: int | None) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            # The deploy itself has ended; without this the bound is too high until the next count.
            with suppress(StoreUnavailable):
                self._quota.settle(self._tenant, hold, stored_bytes)


class _NoChange(AdapterError):
    """Raised inside an update of a record to end it without a write, since there is nothing to count."""
