"""Who calls: keys to tenants, through a cache of a second."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request

from adapters.errors import NotFound
from adapters.keys import parse_key
from adapters.tenants import Tenant, Tenants
from cluster.errors import ServiceError
from gateway.cache import GraceCache
from gateway.config import GatewayConfig
from gateway.local_only import check_local
from gateway.threads import StoreThreads

OPEN_TENANT = "default"
"""Whose functions are served when `auth` is `none`."""
MAX_KEY_TEXT = 512
REFUSAL_SECONDS = 0.05
"""A key is refused after a multiple of this, so that the time tells nothing of whether its tenant exists."""
TENANT_HEADER = "x-garnish-tenant"


class Caller(msgspec.Struct, frozen=True):
    """`tenant` is the one that the key belongs to; None for an admin key."""

    tenant: str | None
    admin: bool


class Callers:
    def __init__(
        self, config: GatewayConfig, tenants: Tenants, threads: StoreThreads, clock: Callable[[], float]
    ) -> None:
        self._open = config.auth == "none"
        self._host = config.host
        self._tenants = tenants
        self._threads = threads
        self._keys: GraceCache[_Key, Caller] = GraceCache(
            self._verify, clock=clock, fresh=config.cache_seconds, grace=config.grace_seconds
        )
        self._known: GraceCache[str, Tenant] = GraceCache(
            self._record, clock=clock, fresh=config.cache_seconds, grace=config.grace_seconds
        )

    async def caller(self, request: Request) -> Caller:
        """Raises ServiceError: `unauthenticated` without a valid key; `forbidden` for another site's page while there
        are no keys."""
        if self._open:
            check_local(request, self._host)
            return Caller(tenant=OPEN_TENANT, admin=True)
        text = _key_text(request)
        if parse_key(text) is None:
            raise _invalid_key()
        began = time.monotonic()
        try:
            return await self._keys.get(_Key(text))
        except ServiceError:
            await asyncio.sleep(REFUSAL_SECONDS - (time.monotonic() - began) % REFUSAL_SECONDS)
            raise

    async def tenant(self, request: Request) -> str:
        """Inside whose functions the request is looked up. Raises ServiceError."""
        caller = await self.caller(request)
        named = request.headers.get(TENANT_HEADER)
        if named is None:
            if caller.tenant is None:
                raise ServiceError(
                    "invalid_request", f"an admin key names a tenant in the header {TENANT_HEADER}", param=TENANT_HEADER
                )
            return caller.tenant
        if named == caller.tenant:
            return named
        if not caller.admin:
            raise ServiceError("forbidden", "only an admin key may act for another tenant", param=TENANT_HEADER)
        return (await self._known.get(named)).id

    async def account(self, tenant: str) -> Tenant:
        """The tenant's record, as old as a key may be. Raises NotFound, StoreUnavailable."""
        try:
            return await self._known.get(tenant)
        except NotFound:
            if self._open and tenant == OPEN_TENANT:
                return Tenant(id=tenant)
            raise

    def forget(self, tenant: str) -> None:
        """After a change of the tenant or its keys: this process must not answer from before it."""
        self._known.forget_where(lambda name: name == tenant)
        self._keys.forget_where(lambda key: key.tenant == tenant)

    async def admin(self, request: Request) -> None:
        """Raises ServiceError `forbidden` for a tenant's key."""
        if not (await self.caller(request)).admin:
            raise ServiceError("forbidden", "this route needs an admin key")

    async def _verify(self, key: _Key) -> Caller:
        principal = await self._threads.read(self._tenants.verify, key.text)
        if principal is None:
            raise _invalid_key()
        return Caller(tenant=principal.tenant, admin=principal.tenant is None)

    async def _record(self, name: str) -> Tenant:
        return await self._threads.read(self._tenants.get, name)


class _Key:
    """A key as a cache's key: equal by its hash, so that comparing takes no time that tells of the text."""

    __slots__ = ("_digest", "tenant", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        claim = parse_key(text)
        self.tenant = claim.tenant if claim else None
        self._digest = hashlib.sha256(text.encode()).digest()

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._digest == other._digest


def _key_text(request: Request) -> str:
    scheme, _, text = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not text:
        text = request.headers.get("x-api-key", "")
    text = text.strip()
    if not text:
        raise ServiceError("unauthenticated", "send a key: `Authorization: Bearer KEY` or `x-api-key: KEY`")
    if len(text) > MAX_KEY_TEXT or not text.isascii():
        raise _invalid_key()
    return text


def _invalid_key() -> ServiceError:
    return ServiceError("unauthenticated", "the key is not valid")
