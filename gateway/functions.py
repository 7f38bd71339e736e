"""Names to versions: each request asks once, and a cache answers for a second."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from adapters.errors import NotFound
from adapters.functions import Defaults
from adapters.names import is_name
from adapters.registry import Registry, Resolved
from cluster.messages import Adapter
from gateway.cache import GraceCache
from gateway.config import GatewayConfig
from gateway.threads import StoreThreads

Key = tuple[str, str, str]
"""Tenant, function, qualifier (empty: none stated)."""


class Target(msgspec.Struct, frozen=True):
    """What an invocation runs: one version of a function, or the base model alone (`adapter` None)."""

    function: str
    version: int | None = None
    adapter: Adapter | None = None
    defaults: Defaults = Defaults()
    timeout: float | None = None
    """The function's own default; seconds."""

    @property
    def digest(self) -> str | None:
        return self.adapter.digest if self.adapter else None


class Functions:
    def __init__(
        self, config: GatewayConfig, registry: Registry, threads: StoreThreads, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._threads = threads
        self._cache: GraceCache[Key, Target] = GraceCache(
            self._load, clock=clock, fresh=config.cache_seconds, grace=config.grace_seconds
        )

    async def target(self, tenant: str, name: str, qualifier: str | None) -> Target:
        """The base model's id names the base. Raises NotFound, StoreUnavailable, InvalidAdapter."""
        if name == self._registry.base.id and not qualifier:
            return Target(function=name)
        if not is_name(name) or (qualifier is not None and not is_name(qualifier)):
            raise NotFound(f"there is no function {name[:100]!r}")
        return await self._cache.get((tenant, name, qualifier or ""))

    def forget(self, tenant: str, name: str) -> None:
        """After a deploy or a delete: this process must not answer from before it."""
        self._cache.forget_where(lambda key: key[:2] == (tenant, name))

    def forget_tenant(self, tenant: str) -> None:
        """After the tenant was deleted."""
        self._cache.forget_where(lambda key: key[0] == tenant)

    async def _load(self, key: Key) -> Target:
        tenant, name, qualifier = key
        return _target(await self._threads.read(self._registry.resolve, tenant, name, qualifier or None))


def _target(found: Resolved) -> Target:
    return Target(
        function=found.function,
        version=found.version,
        adapter=Adapter(digest=found.digest, artifact=found.artifact_key, bytes=found.bytes, ranks=found.ranks),
        defaults=found.policy.defaults,
        timeout=found.policy.timeout,
    )
