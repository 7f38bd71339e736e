"""List of the functions whose policy has warm windows. It is one object, so that the leader need not read all
functions.

A writer of a policy records its function here before it commits. The leader removes a function that turns out to have
no windows, but only when no writer can still be about to commit. If a writer records the function at the same time, the
removal is repeated on the new list, and keeps the function.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from adapters.errors import Conflict
from adapters.records import find_record, update_record
from adapters.store import ObjectStore

SCHEDULES_KEY = "schedules.json"
SETTLED_SECONDS = 600.0
"""Seconds after which a writer that recorded a function has committed its policy, or never will."""
MAX_SCHEDULED = 5000
MAX_TENANT_SCHEDULED = 500


class Schedules(msgspec.Struct, frozen=True):
    """Content of schedules.json."""

    functions: dict[str, float] = {}
    """Unix time (store's clock) at which each `tenant/function` was recorded."""


def record_schedule(store: ObjectStore, tenant: str, function: str) -> None:
    """Records that the function has warm windows. Raises StoreUnavailable, or Conflict when there are too many such
    functions."""
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
    """Returns the recorded functions, which may have warm windows. Raises StoreUnavailable or CorruptRecord."""
    return find_record(store, SCHEDULES_KEY, Schedules) or Schedules()


def forget_schedules(store: ObjectStore, functions: Collection[str]) -> None:
    """Removes those of `functions` that were recorded more than SETTLED_SECONDS ago. Raises StoreUnavailable or
    CorruptRecord."""
    before = store.now() - SETTLED_SECONDS

    def pruned(current: Schedules | None) -> Schedules:
        current = current or Schedules()
        stale = {each for each in functions if current.functions.get(each, before) < before}
        return Schedules({key: at for key, at in current.functions.items() if key not in stale}) if stale else current

    update_record(store, SCHEDULES_KEY, Schedules, pruned)
