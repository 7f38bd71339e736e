"""Adapters that each tenant has had run, or provisioned, so that it is shown the residency of no others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_TENANTS = 4096
MAX_DIGESTS = 1024
"""Per tenant; the one that was called least recently is forgotten."""


@dataclass(kw_only=True)
class CalledDigests:
    """Digests that each tenant has called. Equal adapters of two tenants have one digest, and one copy on a node: a
    tenant that never called it would learn from its residency that another one does."""

    on_first: Callable[[str, str], None] = lambda *_: None
    """Called with each tenant and digest that `run` notes for the first time."""
    max_tenants: int = MAX_TENANTS
    max_digests: int = MAX_DIGESTS
    _digests: OrderedDict[str, OrderedDict[str, None]] = field(default_factory=OrderedDict, init=False)

    def run(self, tenant: str, digest: str) -> None:
        """The tenant has it run here."""
        if not self.has(tenant, digest):
            self.on_first(tenant, digest)
        self.record(tenant, digest)

    def record(self, tenant: str, digest: str) -> None:
        """The tenant has it run somewhere."""
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
