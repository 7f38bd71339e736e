"""The functions whose policy has warm windows, in one object, so that the leader need not look at all.

A policy's writer notes its function here before it commits. The leader takes a function out that turns out to have no
windows, but only when no writer can be about to commit any more; by compare-and-swap, one that comes between wins.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from adapters.errors import Conflict
from adapters.records import find_record, update_record
from adapters.store import ObjectStore

SCHEDULES_KEY = "schedules.json"
SETTLED_SECONDS = 600.0
"""Seconds after which a writer that has recorded a function has committed its policy, or never will."""
MAX_SCHEDULED = 5000
MAX_TENANT_SCHEDULED = 500


class Schedules(msgspec.Struct, frozen=True):
    """The content of schedules.json."""

    functions: dict[str, float] = {}
    """Maps `tenant/function` to the time at which it was recorded, by the store's clock."""


def record_schedule(store: ObjectStore, tenant: str, function: str) -> None:
    """Records that the function has warm windows. Raises Conflict when there are too many, StoreUnavailable."""
    key = f"{tenant}/{function}"

    def noted(current: Schedules | None) -> Schedules:
        functions = {} if current is None else current.functions
        of_tenant = sum(each.startswith(f"{tenant}/") for each in functions)
        if key not in functions and of_tenant >= MAX_TENANT_SCHEDULED:
            raise Conflict(f"a tenant has warm windows for {MAX_TENANT_SCHEDULED} functions at most")
        if key not in functions and len(functions) >= MAX_SCHEDULED:
            raise Conflict(f"the service has warm windows for {MAX_SCHEDULED} functions already")
        return Schedules({**functions, key: store.now()})

    update_record(store, SCHEDULES_KEY, Schedules, noted)


def read_schedules(store: ObjectStore) -> Schedules:
    """Returns the functions that have warm windows. Raises StoreUnavailable, CorruptRecord."""
    return find_record(store, SCHEDULES_KEY, Schedules) or Schedules()


def forget_schedules(store: ObjectStore, functions: Collection[str]) -> None:
    """Takes out those of `functions` that were noted more than SETTLED_SECONDS ago. Raises StoreUnavailable,
    CorruptRecord."""
    before = store.now() - SETTLED_SECONDS

    def pruned(current: Schedules | None) -> Schedules:
        current = current or Schedules()
        stale = {each for each in functions if current.functions.get(each, before) < before}
        return Schedules({key: at for key, at in current.functions.items() if key not in stale}) if stale else current

    update_record(store, SCHEDULES_KEY, Schedules, pruned)
