"""Adapters that each tenant has run or provisioned. Tenants see the residency of these only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_TENANTS = 4096
MAX_DIGESTS_PER_TENANT = 1024


@dataclass(kw_only=True)
class CalledDigests:
    """Digests that each tenant has called.

    Equal adapters of two tenants have the same digest and one copy on a node. So the residency of an adapter that a
    tenant never called would reveal that another tenant calls it.
    """

    on_first: Callable[[str, str], None] = lambda *_: None
    max_tenants: int = MAX_TENANTS
    max_digests: int = MAX_DIGESTS_PER_TENANT
    _digests: OrderedDict[str, OrderedDict[str, None]] = field(default_factory=OrderedDict, init=False)

    def run(self, tenant: str, digest: str) -> None:
        """Records that a call on this worker runs the adapter for the tenant."""
        if not self.has(tenant, digest):
            self.on_first(tenant, digest)
        self.record(tenant, digest)

    def record(self, tenant: str, digest: str) -> None:
        """Records that the tenant has run the adapter, here or on another worker."""
        digests = self._digests.setdefault(tenant, OrderedDict())
        self._digests.move_to_end(tenant)
        digests[digest] = None
        digests.move_to_end(digest)
        if len(digests) > self.max_digests:
            digests.popitem(last=False)
        if len(self._digests) > self.max_tenants:
            self._digests.popitem(last=False)

    def has(self, tenant: str, digest: str) -> bool:
        return digest in self._digests.get(tenant, ())
