"""Deletion of a tenant. The tenant's keys are deleted at once. Its functions, asynchronous calls, files and batches,
which no caller can reach any more, are then deleted one by one."""

from __future__ import annotations

from contextlib import suppress

from adapters.errors import NotFound
from adapters.registry import Registry
from adapters.store import ObjectStore, all_objects
from adapters.tenants import Tenants

PAGE = 100


def data_prefix(tenant: str) -> str:
    """Returns the prefix of the object keys of the tenant's files and batches."""
    return f"data/{tenant}/"


def delete_tenant(tenants: Tenants, registry: Registry, tenant: str) -> None:
    """Deletes a tenant with all its data. Blocks until all functions, calls and files are deleted. If it is
    interrupted, calling it again completes the deletion.

    Raises NotFound, Conflict (declared in serverless.yml) or StoreUnavailable.
    """
    tenants.delete(tenant)
    after: str | None = ""
    while after is not None:
        records, after = registry.functions(tenant, after, PAGE)
        for record in records:
            with suppress(NotFound):  # its owner has already deleted it
                registry.delete_function(tenant, record.name)
    _remove_events(tenants.store, tenant)
    remove_below(tenants.store, data_prefix(tenant))
    tenants.removed(tenant)


def remove_below(store: ObjectStore, prefix: str) -> None:
    """Deletes all objects whose keys start with `prefix`."""
    for info in all_objects(store, prefix):
        store.delete(info.key)


def _remove_events(store: ObjectStore, tenant: str) -> None:
    """Removes the tenant's asynchronous calls and webhook secrets, so that a new tenant of this name starts with
    nothing. The calls' markers become orphans, which the next reader removes."""
    store.delete(f"tenants/{tenant}/webhook_secrets.json")
    remove_below(store, f"tenants/{tenant}/invocations/")
