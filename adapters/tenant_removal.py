"""The end of a tenant: its keys at once, then its functions, files and batches, which nobody can reach any more."""

from __future__ import annotations

from contextlib import suppress

from adapters.errors import NotFound
from adapters.registry import Registry
from adapters.tenants import Tenants

PAGE = 100


def data_prefix(tenant: str) -> str:
    """Returns what the keys of the tenant's files and batches begin with."""
    return f"data/{tenant}/"


def delete_tenant(tenants: Tenants, registry: Registry, tenant: str) -> None:
    """Blocks for as long as there are functions or files. One that dies half-way is ended by calling it again.

    Raises NotFound, Conflict (declared in serverless.yml), StoreUnavailable.
    """
    tenants.delete(tenant)
    after: str | None = ""
    while after is not None:
        records, after = registry.functions(tenant, after, PAGE)
        for record in records:
            with suppress(NotFound):  # its owner was faster
                registry.delete_function(tenant, record.name)
    while page := tenants.store.list(data_prefix(tenant)):
        for info in page:
            tenants.store.delete(info.key)
    tenants.removed(tenant)
