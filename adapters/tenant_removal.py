"""The end of a tenant: its keys at once, then its functions, asynchronous calls, files and batches, which nobody can
reach any more, one by one."""

from __future__ import annotations

from contextlib import suppress

from adapters.errors import NotFound
from adapters.registry import Registry
from adapters.store import ObjectStore, all_objects
from adapters.tenants import Tenants

PAGE = 100


def data_prefix(tenant: str) -> str:
    """Returns what the keys of the tenant's files and batches begin with."""
    return f"data/{tenant}/"


def delete_tenant(tenants: Tenants, registry: Registry, tenant: str) -> None:
    """Deletes a tenant with all that it has; blocks for as long as there are functions, calls or files. A deletion that
    dies half-way is completed by calling this again.

    Raises NotFound, Conflict (declared in serverless.yml), StoreUnavailable.
    """
    tenants.delete(tenant)
    after: str | None = ""
    while after is not None:
        records, after = registry.functions(tenant, after, PAGE)
        for record in records:
            with suppress(NotFound):  # its owner was faster
                registry.delete_function(tenant, record.name)
    _remove_events(tenants.store, tenant)
    remove_below(tenants.store, data_prefix(tenant))
    tenants.removed(tenant)


def remove_below(store: ObjectStore, prefix: str) -> None:
    for info in all_objects(store, prefix):
        store.delete(info.key)


def _remove_events(store: ObjectStore, tenant: str) -> None:
    """Removes asynchronous calls and webhook secrets, so that a new tenant of this name begins with nothing. The calls'
    markers are orphans then; the next reader of one removes it."""
    store.delete(f"tenants/{tenant}/webhook_secrets.json")
    remove_below(store, f"tenants/{tenant}/invocations/")
