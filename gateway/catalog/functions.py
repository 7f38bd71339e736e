"""Resolves names to versions, with a cache that is valid until the function may have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from adapters.aliases import point_of
from adapters.choices import Choice, pick
from adapters.errors import NoSuchFunction
from adapters.functions import Policy
from adapters.names import is_name
from adapters.registry import Registry
from adapters.standing import function_key
from cluster.errors import ServiceError
from cluster.messages import Adapter
from gateway.catalog.adapters import adapter_of
from gateway.catalog.cache import GraceCache
from gateway.catalog.rebuilds import Rebuilds
from gateway.catalog.threads import StoreThreads
from gateway.config import GatewayConfig
from gateway.http.errors import STORE_RETRY_AFTER
from gateway.places.places import Places

T = TypeVar("T")

Key = tuple[str, str, str]
"""Tenant, function and qualifier; the qualifier is empty if none is stated."""


class Target(msgspec.Struct, frozen=True):
    """The target of an invocation: one version of a function, or the base model alone (`adapter` None)."""

    function: str
    version: int | None = None
    adapter: Adapter | None = None
    policy: Policy = Policy()

    @property
    def digest(self) -> str | None:
        return self.adapter.digest if self.adapter else None


class Functions:
    def __init__(
        self,
        config: GatewayConfig,
        registry: Registry,
        threads: StoreThreads,
        clock: Callable[[], float],
        confirmed: Callable[[str], float],
        rebuilds: Places | int = 1,
    ) -> None:
        """`confirmed` returns the time, by `clock`, at which the record with this key was last known to be unchanged.
        `rebuilds`: places for rebuilds of artifacts, as in LeavableThreads."""
        self.on_change: Callable[[str, str], None] = lambda *_: None
        self._registry = registry
        self._threads = threads
        self._rebuilds = Rebuilds(registry, self.forget, rebuilds)
        self._cache: GraceCache[Key, Sequence[Choice]] = GraceCache(
            self._load,
            clock=clock,
            fresh=config.cache_seconds,
            grace=config.grace_seconds,
            confirmed=lambda key: confirmed(function_key(key[0], key[1])),
            is_final=_is_final,
        )

    async def target(self, tenant: str, name: str, qualifier: str | None, side: str) -> Target:
        """Returns the target of a call. The base model's id without a qualifier means the base model.

        `side`: key that selects the version if an alias splits its calls. Calls with the same key get the same version
        as long as the alias's shares do not change. Raises NotFound, StoreUnavailable, InvalidAdapter, CorruptArtifact,
        ArtifactPending.
        """
        if name == self._registry.base.id and not qualifier:
            return Target(function=name)
        choices = await self.choices(tenant, name, qualifier)
        resolved = pick(choices, point_of(tenant, name, qualifier or "latest", side))
        return Target(resolved.function, resolved.version, adapter_of(resolved), resolved.policy)

    async def choices(self, tenant: str, name: str, qualifier: str | None) -> Sequence[Choice]:
        """Returns the versions that a qualifier stands for, with their shares, from the cache or `Registry.choices`."""
        if not is_name(name) or (qualifier is not None and not is_name(qualifier)):
            raise NoSuchFunction(tenant, name)
        return await self._cache.get((tenant, name, qualifier or ""))

    async def change(self, change: Callable[..., T], tenant: str, name: str, *args: Any) -> T:
        """Changes a function in the registry, as in `changing`, and returns the result of
        `change(tenant, name, *args)`."""
        with self.changing(tenant, name):
            return await self._threads.write(change, tenant, name, *args)

    @contextmanager
    def changing(self, tenant: str, name: str) -> Iterator[None]:
        """Context in which a function is changed in the registry. Afterwards this process does not use records from
        before the change.

        That also holds if the change fails or its caller is cancelled, because the thread may still have made it.
        """
        try:
            yield
        finally:
            self.forget(tenant, name)
            self.on_change(tenant, name)

    def forget(self, tenant: str, name: str) -> None:
        """Forgets a cached function, after this or another process has changed it."""
        self._cache.forget_where(lambda key: key[:2] == (tenant, name))

    def forget_all(self) -> None:
        """Forgets all cached functions, after it is unknown which records have changed."""
        self._cache.forget_where(lambda _: True)

    def forget_tenant(self, tenant: str) -> None:
        """Forgets the tenant's functions, after it was deleted."""
        self._cache.forget_where(lambda key: key[0] == tenant)

    def remake(self, tenant: str, target: Target) -> ServiceError:
        """Starts to rebuild an artifact that a node has found to be damaged, or to check the original files if the
        base has no artifacts. Returns the error with which the call ends."""
        assert target.version is not None and target.digest is not None  # nodes report damage of adapters only
        self._rebuilds.request(tenant, target.function, target.version, target.digest)
        version = f"version {target.version} of function {target.function}"
        damage = f"the artifact of {version} was damaged: it is being made again"
        if not self._registry.base.has_artifacts:
            damage = f"the stored files of {version} are damaged: they are being checked"
        return ServiceError("unavailable", damage, retry_after=STORE_RETRY_AFTER)

    async def _load(self, key: Key) -> Sequence[Choice]:
        tenant, name, qualifier = key
        choices = await self._threads.read(self._registry.choices, tenant, name, qualifier or None)
        for choice in choices:
            if choice.pending:
                self._rebuilds.request(tenant, name, choice.version.version, choice.version.digest)
        return choices


def _is_final(choices: Sequence[Choice]) -> bool:
    """Returns whether the versions can change only with the function's record. Artifacts change without it: damaged
    ones are built again."""
    return not any(choice.damaged or choice.pending for choice in choices)
