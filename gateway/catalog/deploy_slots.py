"""Limits concurrent deploys, so that no tenant's uploads keep the other tenants from deploying."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from cluster.errors import ServiceError
from gateway.config import GatewayConfig, share

RETRY_AFTER = 2.0


class _Share:
    def __init__(self, stores: int) -> None:
        self.uploads = 0
        self.stores = asyncio.Semaphore(stores)


class DeploySlots:
    """Slots for deploys.

    An upload takes memory and disk for as long as its sender likes, so each tenant has only a few upload slots.
    Checking and storing takes a thread. These slots are shared, and a tenant can have only some of them at once.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._free_uploads = share(config.max_uploads, config)
        self._tenant_uploads = share(config.max_tenant_uploads, config)
        self._stores = asyncio.Semaphore(share(config.max_deploys, config))
        self._tenant_stores = share(config.max_tenant_deploys, config)
        self._wait_seconds = config.deploy_wait
        self._shares: dict[str, _Share] = {}

    @contextmanager
    def deploy(self, tenant: str) -> Iterator[None]:
        """Holds an upload slot from the start of the upload to the reply.

        If all slots, or all slots of the tenant, are taken, it raises ServiceError `overloaded` at once.
        """
        tenant_share = self._shares.get(tenant)
        if tenant_share is not None and tenant_share.uploads >= self._tenant_uploads:
            raise _busy(f"you have {tenant_share.uploads} deploys under way already")
        if self._free_uploads <= 0:
            raise _busy("too many deploys at once")
        tenant_share = self._shares.setdefault(tenant, _Share(self._tenant_stores))
        tenant_share.uploads += 1
        self._free_uploads -= 1
        try:
            yield
        finally:
            tenant_share.uploads -= 1
            self._free_uploads += 1
            if not tenant_share.uploads:
                del self._shares[tenant]

    @asynccontextmanager
    async def store(self, tenant: str) -> AsyncIterator[None]:
        """Holds a slot for checking and storing a complete upload; must be used inside `deploy`.

        Raises ServiceError `overloaded` if no slot becomes free within `deploy_wait` seconds.
        """
        async with AsyncExitStack() as places:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await places.enter_async_context(self._shares[tenant].stores)
                    await places.enter_async_context(self._stores)
            except TimeoutError:
                raise _busy("too many deploys at once") from None
            yield


def _busy(why: str) -> ServiceError:
    return ServiceError("overloaded", f"{why}; try again later", retry_after=RETRY_AFTER)
