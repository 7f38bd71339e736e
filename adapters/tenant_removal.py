"""The end of a tenant: its keys at once, then its functions and asynchronous calls, which nobody can reach any more,
one by one."""

from __future__ import annotations

from contextlib import suppress

from adapters.errors import NotFound
from adapters.registry import Registry
from adapters.store import ObjectStore
from adapters.tenants import Tenants

PAGE = 100


def delete_tenant(tenants: Tenants, registry: Registry, tenant: str) -> None:
    """Blocks for as long as there are functions. One that dies half-way is ended by calling it again.

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
    tenants.removed(tenant)


def _remove_events(store: ObjectStore, tenant: str) -> None:
    """Removes asynchronous calls and webhook secrets: whoever makes the tenant again begins with nothing. Markers of
    the calls belong to nothing then, and whoever meets one removes it."""
    store.delete(f"tenants/{tenant}/webhook_secrets.json")
    while page := store.list(f"tenants/{tenant}/invocations/"):
        for info in page:
            store.delete(info.key)
