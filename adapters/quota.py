"""Limits on the number and size of a tenant's adapters, enforced by all gateways together.

Only the adapters of tenants with such a limit are counted. `Tenant.held` is an upper bound, which every deploy raises
by compare-and-swap before it writes anything. Racing deploys thus can't exceed the limit together, and a deploy need
not read all functions. If a deploy dies, or its outcome is unknown, the bound stays too high, but is never too low.
When the bound would refuse a deploy and may be too high, the functions are counted again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from adapters.errors import AdapterError, Conflict, PreconditionFailed, StoreUnavailable
from adapters.functions import FunctionRecord
from adapters.names import is_name
from adapters.records import find_record, read_record, read_records, update_record
from adapters.store import MAX_LIST, ObjectStore
from adapters.tenants import Hold, Limits, QuotaUsage, Tenant, tenant_key, unknown

HOLD_SECONDS = 1800.0
"""Seconds after which a deploy that has not ended counts as dead. A count then ignores its hold."""
RECOUNT_SECONDS = 3600.0
"""Seconds after which the adapters of a tenant at its limit are counted again, even if the bound may be right."""
RECOUNTS = 10


class Quota:
    """Reserves and counts tenants' adapters against their limits. Methods block. `clock` returns Unix time by the
    store's clock, the same for all gateways."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] | None = None) -> None:
        self._store = store
        self._clock = clock or store.now

    @contextmanager
    def deploying(self, tenant: str) -> Iterator[QuotaReservation]:
        """Context of a deploy, which yields its reservation. Call `take` before anything is stored, and `commit` once
        the version is listed. Without `commit` the reservation is released at the end."""
        room = QuotaReservation(self, tenant)
        try:
            yield room
        except StoreUnavailable:
            raise  # the version may be listed all the same, so its room stays taken until the next count
        except BaseException:
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
                self._change(tenant, lambda current: _given_back(current, freed, before=before))

    def take(self, tenant: str, size: int) -> str | None:
        """Reserves quota for one version of `size` bytes. Returns the id of the hold; None for a tenant without such a
        limit.

        Raises Conflict at the limit, NotFound for a deleted tenant, or StoreUnavailable.
        """
        record = self.check(tenant)
        if record is None or record.held is None:
            return None
        if _must_count(record.held, self._clock()) and not self._count(tenant):
            raise StoreUnavailable(f"the adapters of tenant {tenant} change too often to be counted")
        try:
            return self._reserve(tenant, size)
        except Conflict:
            record = self._read(tenant)
            if record is None or record.held is None or not _may_be_high(record.held, self._clock()):
                raise
            self._count(tenant)
            return self._reserve(tenant, size)

    def check(self, tenant: str) -> Tenant | None:
        """Returns the tenant's record; None if it has none. Raises NotFound for a deleted tenant."""
        record = self._read(tenant)
        if record is not None and record.deleted:
            raise unknown(tenant)
        return record

    def settle(self, tenant: str, hold: str, stored_bytes: int | None) -> None:
        """Ends a hold. `stored_bytes` is the size of the version that is now listed; None: no version."""
        self._change(tenant, lambda usage: _settled(usage, hold, stored_bytes))

    def _reserve(self, tenant: str, size: int) -> str:
        hold = secrets.token_hex(8)

        def reserve(record: Tenant | None) -> Tenant:
            if record is None or record.deleted:
                raise unknown(tenant)
            if record.held is None:
                return record
            _check(record.limits, record.held, size)
            holds = record.held.holds | {hold: Hold(bytes=size, when=self._clock())}
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
            record, etag = stored
            epoch = usage.epoch
            counted = _recounted(usage, self._functions(tenant), self._clock())
            try:
                data = msgspec.json.encode(msgspec.structs.replace(record, held=counted))
                self._store.put_if_match(tenant_key(tenant), data, etag)
            except PreconditionFailed:
                continue
            return True
        return False

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

    def __init__(self, quota: Quota, tenant: str) -> None:
        self._quota = quota
        self._tenant = tenant
        self._hold: str | None = None
        self._size = 0

    def take(self, size: int) -> None:
        """Reserves quota for a version of `size` bytes, before it is stored. Later attempts of the same deploy keep the
        first reservation.

        Raises what `Quota.take` raises.
        """
        if self._hold is None:
            self._hold, self._size = self._quota.take(self._tenant, size), size

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


class Freed:
    """Number and bytes of the versions that a removal has removed."""

    def __init__(self) -> None:
        self.adapters = 0
        self.bytes = 0

    def set(self, adapters: int, size: int) -> None:
        """Records what the last attempt removed, replacing earlier attempts: an attempt that lost a race removed
        nothing."""
        self.adapters, self.bytes = adapters, size


class _NoChange(AdapterError):
    """Raised inside an update of a record to end it without a write, since there is nothing to count."""


def _check(limits: Limits, usage: QuotaUsage, size: int) -> None:
    adapters = usage.adapters + len(usage.holds) + 1
    if limits.adapters is not None and adapters > limits.adapters:
        raise Conflict(
            f"the tenant may have {limits.adapters} adapters (versions of functions), and has them; delete some first"
        )
    total = usage.bytes + sum(hold.bytes for hold in usage.holds.values()) + size
    if limits.bytes is not None and total > limits.bytes:
        raise Conflict(
            f"the tenant may have {limits.bytes} bytes of adapters, and with the {size} of this one has {total}"
        )


def _must_count(usage: QuotaUsage, now: float) -> bool:
    """Returns whether the functions must be counted before a deploy. They must be if they were never counted. They also
    must be once HOLD_SECONDS have passed since the limits were set, if there was no count after that time. Deploys that
    began before the limits were set may be missing in earlier counts."""
    known_to_all = usage.since + HOLD_SECONDS
    return usage.counted is None or usage.counted < known_to_all < now


def _may_be_high(usage: QuotaUsage, now: float) -> bool:
    stale = any(hold.when < now - HOLD_SECONDS for hold in usage.holds.values())
    return not usage.exact or stale or usage.counted is None or now - usage.counted > RECOUNT_SECONDS


def _recounted(usage: QuotaUsage, functions: Iterator[FunctionRecord], now: float) -> QuotaUsage:
    adapters = size = 0
    for record in functions:
        adapters += len(record.versions)
        size += sum(entry.bytes for entry in record.versions)
    # A listed version whose hold is not settled yet counts twice. The bound is then too high, which is safe.
    holds = {key: hold for key, hold in usage.holds.items() if hold.when >= now - HOLD_SECONDS}
    return QuotaUsage(usage.since, adapters, size, holds, counted=now, epoch=usage.epoch + 1, exact=not holds)


def _settled(usage: QuotaUsage, hold: str, stored_bytes: int | None) -> QuotaUsage:
    """Returns the usage without the hold, and with `stored_bytes` added, if any. A missing hold was dropped by a count,
    which may or may not have seen its version: the sums are not exact then."""
    is_open = hold in usage.holds
    return msgspec.structs.replace(
        usage,
        adapters=usage.adapters + (stored_bytes is not None),
        bytes=usage.bytes + (stored_bytes or 0),
        holds={key: open_hold for key, open_hold in usage.holds.items() if key != hold},
        exact=usage.exact and is_open,
    )


def _given_back(usage: QuotaUsage, freed: Freed, before: QuotaUsage) -> QuotaUsage:
    """Returns the usage without the removed versions. If there was a count since `before`, it is unknown whether it saw
    the removal: the sums stay unchanged then, and may be too high."""
    if (usage.since, usage.epoch) != (before.since, before.epoch):
        return msgspec.structs.replace(usage, exact=False)
    return msgspec.structs.replace(
        usage, adapters=max(0, usage.adapters - freed.adapters), bytes=max(0, usage.bytes - freed.bytes)
    )
