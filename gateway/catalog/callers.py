"""Authenticates callers: maps keys to tenants by the cached record of the key's owner.

A key that is not in the record is looked up in the registry, at a limited rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.requests import Request

from adapters.errors import NotFound, StoreUnavailable
from adapters.keys import Principal, opens, parse_key
from adapters.tenants import ADMIN_KEY, Tenant, Tenants, tenant_key
from cluster.errors import ServiceError
from gateway.catalog.cache import GraceCache
from gateway.catalog.key_lookups import MAX_LOOKUPS_PER_S, KeyLookups
from gateway.catalog.threads import StoreThreads
from gateway.config import GatewayConfig, is_loopback, share
from gateway.http.params import TENANT_HEADER
from gateway.http.routing import Caller

OPEN_TENANT = "default"
"""Tenant whose functions are served when `auth` is `none`."""
MAX_KEY_TEXT = 512
MAX_TENANTS = 50_000
REFUSAL_SECONDS = 0.05
"""Time unit, in seconds, of refusals of keys: each takes a multiple of it. So the duration does not show whether the
tenant exists."""


class Callers:
    def __init__(
        self,
        config: GatewayConfig,
        tenants: Tenants,
        threads: StoreThreads,
        clock: Callable[[], float],
        confirmed: Callable[[str], float],
    ) -> None:
        self._open = config.auth == "none"
        self._host = config.host
        self._tenants = tenants
        self._threads = threads
        self._lookups = KeyLookups(share(MAX_LOOKUPS_PER_S, config), clock)
        self._owners: GraceCache[str | None, _Owner] = GraceCache(
            self._owner,
            clock=clock,
            fresh=config.cache_seconds,
            grace=config.grace_seconds,
            confirmed=lambda tenant: confirmed(ADMIN_KEY if tenant is None else tenant_key(tenant)),
        )
        """Cached owners of keys, by tenant. The key None stands for all administrators."""
        self._names: set[str | None] = set()
        """Tenants that probably exist. Their records are read even before their first call."""

    async def learn_tenants(self) -> None:
        """Reads the names of existing tenants, so that their keys need no rate-limited lookup. Called once, before the
        first request."""
        after = ""
        with suppress(StoreUnavailable):
            while len(self._names) < MAX_TENANTS and (names := await self._threads.read(self._tenants.names, after)):
                self._names.update(names)
                after = names[-1]

    async def caller(self, request: Request) -> Caller:
        """Returns the caller of a request.

        Raises ServiceError: `unauthenticated` without a valid key; `forbidden` for another site's page if no keys are
        required.
        """
        if self._open:
            _check_local(request, self._host)
            return Caller(tenant=OPEN_TENANT, admin=True)
        text = _key_text(request)
        claim = parse_key(text)
        if claim is None:
            raise _invalid_key()
        began = time.monotonic()
        try:
            if not await self._check_cached_owner(text, claim):
                await self._look_up(text, claim)
            return Caller(tenant=claim.tenant, admin=claim.tenant is None, key_id=claim.key_id)
        except ServiceError:
            await asyncio.sleep(REFUSAL_SECONDS - (time.monotonic() - began) % REFUSAL_SECONDS)
            raise

    async def tenant(self, request: Request) -> str:
        """Returns the tenant for which the request is made. Raises ServiceError."""
        caller = await self.caller(request)
        stated = request.headers.get(TENANT_HEADER)
        if stated is None:
            if caller.tenant is None:
                raise ServiceError(
                    "invalid_request",
                    f"with an admin key, name the tenant in the header {TENANT_HEADER}",
                    param=TENANT_HEADER,
                )
            return caller.tenant
        if stated == caller.tenant:
            return stated
        if not caller.admin:
            raise ServiceError("forbidden", "only an admin key may act for another tenant", param=TENANT_HEADER)
        return (await self._owners.get(stated)).record.id

    async def account(self, tenant: str) -> Tenant:
        """Returns the tenant's record, which may be as old as cached keys are. Raises NotFound, StoreUnavailable."""
        try:
            return (await self._owners.get(tenant)).record
        except NotFound:
            if self._open and tenant == OPEN_TENANT:
                return Tenant(id=tenant)
            raise

    async def is_valid(self, tenant: str | None, key_id: str) -> bool:
        """Returns whether a key exists and is not revoked. Raises StoreUnavailable.

        `tenant`: owner of the key; None for an administrator's key.
        """
        try:
            return (await self._owners.get(tenant)).has_id(key_id)
        except NotFound:
            return False

    def forget(self, tenant: str | None) -> None:
        """Forgets cached callers after a change of a tenant or its keys.

        `tenant`: None for administrators.
        """
        self._owners.forget_where(lambda name: name == tenant)
        if tenant is not None and len(self._names) < MAX_TENANTS:
            self._names.add(tenant)

    def forget_all(self) -> None:
        """Forgets all cached callers, after it is unknown which records have changed."""
        self._owners.forget_where(lambda _: True)

    async def admin(self, request: Request) -> None:
        """Checks that the request has an admin key. Raises ServiceError, `forbidden` for a tenant's key."""
        if not (await self.caller(request)).admin:
            raise ServiceError("forbidden", "this route needs an admin key")

    async def _check_cached_owner(self, text: str, claim: Principal) -> bool:
        """Returns whether the key is valid according to its owner's cached record. Returns False if no record is
        cached."""
        if claim.tenant is not None and claim.tenant not in self._names:
            return False
        try:
            return (await self._owners.get(claim.tenant)).has(text, claim)
        except NotFound:
            self._names.discard(claim.tenant)
            return False

    async def _look_up(self, text: str, claim: Principal) -> None:
        """Verifies, in the registry, a key that the cache does not contain. Raises ServiceError. The error does not
        show whether the owner exists."""
        with self._lookups.one():
            if await self._threads.read(self._tenants.verify, text) is None:
                raise _invalid_key()
        self.forget(claim.tenant)

    async def _owner(self, name: str | None) -> _Owner:
        if name is None:
            return _Owner(Tenant(id="", keys=await self._threads.read(self._tenants.admin_keys)))
        return _Owner(await self._threads.read(self._tenants.get, name))


class _Owner:
    """Owner of keys: a tenant, or all administrators together. The owner of the administrators' keys has no name, and
    only its keys are used."""

    __slots__ = ("_keys", "record")

    def __init__(self, record: Tenant) -> None:
        self.record = record
        self._keys = {key.key_id: key for key in record.keys if key.revoked is None}

    def has_id(self, key_id: str) -> bool:
        return key_id in self._keys

    def has(self, text: str, claim: Principal) -> bool:
        key = self._keys.get(claim.key_id)
        return opens(text, claim.key_id, () if key is None else (key,))


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


def _check_local(request: Request, bound_host: str) -> None:
    """Admits only requests to local addresses and from local pages. Without keys, any web page in a browser on this
    host could otherwise call.

    Raises ServiceError `forbidden` for requests that a page of another site can make a browser send. Except for plain
    reads, browsers name the page's site in `Origin`, and they do not let pages read the replies to those. If a site's
    name was made to point to this host (DNS rebinding), `Host` still contains that name.
    """
    host = request.headers.get("host")
    if host is not None and not _is_local(host, bound_host):
        raise ServiceError(
            "forbidden", "while `auth` is `none`, only loopback addresses are served: Host names another"
        )
    for origin in request.headers.getlist("origin"):
        if host is None or origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            raise ServiceError("forbidden", "while `auth` is `none`, pages of other sites may not call: see Origin")


def _is_local(host: str, bound_host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and (is_loopback(name) or name == bound_host.lower())
