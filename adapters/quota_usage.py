"""Sums of a tenant's adapters, and the holds of deploys in progress: how deploys, removals and counts change them.

A version counts once: by its hold while that is open, and by the sums afterwards. The entry of a listed version
therefore names its hold.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from adapters.errors import Conflict
from adapters.functions import FunctionRecord
from adapters.tenants import Hold, Limits, QuotaUsage

HOLD_SECONDS = 1800.0
"""Seconds after which a count ends the hold of a deploy that has not ended. A deploy that is merely slow takes a new
one."""
RECOUNT_SECONDS = 3600.0
"""Seconds after which the adapters of a tenant at its limit are counted again, even if the bound may be right."""


class Freed:
    """Number and bytes of the versions that a removal has removed."""

    def __init__(self) -> None:
        self.adapters = 0
        self.bytes = 0

    def set(self, adapters: int, size: int) -> None:
        """Records what the last attempt removed, replacing earlier attempts: an attempt that lost a race removed
        nothing."""
        self.adapters, self.bytes = adapters, size


def check_room(limits: Limits, usage: QuotaUsage, size: int) -> None:
    """Raises Conflict unless there is room for one more version of `size` bytes."""
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


def must_count(usage: QuotaUsage, now: float) -> bool:
    """Returns whether the functions must be counted before a deploy. They must be if they were never counted. They also
    must be once HOLD_SECONDS have passed since the limits were set, if there was no count after that time. Deploys that
    began before the limits were set may be missing in earlier counts."""
    known_to_all = usage.since + HOLD_SECONDS
    return usage.counted is None or usage.counted < known_to_all < now


def may_be_high(usage: QuotaUsage, now: float) -> bool:
    """Returns whether a count might find that the tenant has less than the bound says."""
    return not usage.exact or bool(stale(usage, now)) or usage.counted is None or now - usage.counted > RECOUNT_SECONDS


def stale(usage: QuotaUsage, now: float) -> dict[str, Hold]:
    """Returns the holds that a count must end, by id."""
    return {key: hold for key, hold in usage.holds.items() if hold.ended or hold.when < now - HOLD_SECONDS}


def ending(usage: QuotaUsage, stale: Iterable[str]) -> QuotaUsage:
    """Returns the usage with the holds in `stale` marked as ended. They still count, since a deploy that has checked
    its hold may be about to list its version."""
    ended = {key: msgspec.structs.replace(usage.holds[key], ended=True) for key in stale}
    return msgspec.structs.replace(usage, holds=usage.holds | ended)


def recounted(usage: QuotaUsage, functions: Iterable[FunctionRecord], now: float) -> QuotaUsage:
    """Returns the usage by the present `functions`, without the holds that have ended."""
    holds = {key: hold for key, hold in usage.holds.items() if not hold.ended}
    # A listed version whose hold is still open is counted when the hold is settled.
    counted = [entry for record in functions for entry in record.versions if entry.hold not in holds]
    size = sum(entry.bytes for entry in counted)
    return QuotaUsage(usage.since, len(counted), size, holds, counted=now, epoch=usage.epoch + 1, exact=not holds)


def settled(usage: QuotaUsage, hold: str, stored_bytes: int | None) -> QuotaUsage:
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


def given_back(usage: QuotaUsage, freed: Freed, before: QuotaUsage) -> QuotaUsage:
    """Returns the usage without the removed versions. If there was a count since `before`, it is unknown whether it saw
    the removal: the sums stay unchanged then, and may be too high. So may they be if more was removed than they have,
    because the hold of a removed version is still open."""
    if (usage.since, usage.epoch) != (before.since, before.epoch):
        return msgspec.structs.replace(usage, exact=False)
    adapters, size = usage.adapters - freed.adapters, usage.bytes - freed.bytes
    return msgspec.structs.replace(
        usage, adapters=max(0, adapters), bytes=max(0, size), exact=usage.exact and min(adapters, size) >= 0
    )
