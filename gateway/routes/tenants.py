"""Routes /tenants/{id}: a tenant and its keys, for administrators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ParamSpec, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from adapters import tenant_removal
from adapters.errors import NotFound
from adapters.names import NAME_RULE, is_name
from adapters.slo import Slo, Weight
from adapters.tenants import FILE_BYTES, MAX_WEBHOOK_HOSTS, FileBytes, Limits, Tenant, WebhookHost
from cluster.errors import ServiceError
from gateway.groups import Admin
from gateway.http.bodies import read_message
from gateway.http.responses import json_response
from gateway.http.routing import Routes
from gateway.webhook_hosts import parse_webhook_hosts
from gateway.workers.attainment import WINDOWS_S

routes = Routes(Admin)

P = ParamSpec("P")
T = TypeVar("T")


class TenantRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a tenant, which replace the previous ones. Without `limits` nothing is limited, and without `slo`
    no latency is promised."""

    slo: Slo | None = None
    limits: Limits | None = None
    weight: Weight = 1.0
    webhook_hosts: Annotated[list[WebhookHost], Meta(max_length=MAX_WEBHOOK_HOSTS)] = []
    """Allowed destinations of the tenant's webhooks in addition to `gateway.webhook_hosts`: hosts, `*.domain`,
    addresses and networks, which may be private."""
    file_bytes: FileBytes = FILE_BYTES


class KeyItem(msgspec.Struct, frozen=True):
    """An API key without its secret text, which is shown only when the key is created. Times are Unix time."""

    key_id: str
    created: float
    revoked: float | None


class Attainment(msgspec.Struct, frozen=True):
    """SLO attainment of the calls that ended in the last `window_seconds`, counted by all gateway workers. `ttft` and
    `tpot` are the fractions of calls that attained this target. A fraction is null if no call had the target."""

    window_seconds: int
    calls: int
    ttft: float | None
    tpot: float | None
    all: float | None
    """Fraction of the calls that attained all of their targets; null if no call had one."""


class TenantReply(msgspec.Struct, frozen=True):
    id: str
    slo: Slo
    limits: Limits
    weight: float
    webhook_hosts: list[str]
    file_bytes: int
    declared: bool
    """True if serverless.yml declares the tenant. In that case only its keys can be changed through the API."""
    keys: list[KeyItem]
    attainment: list[Attainment]


class NewKeyReply(msgspec.Struct, frozen=True):
    """A new API key. `key` is shown only in this reply, because the service stores a hash of it."""

    tenant: str
    key_id: str
    key: str
    created: float


@routes.admin("GET /tenants/{tenant}", "A tenant: limits, and its keys without their text", {200: TenantReply})
async def get_tenant(request: Request, admin: Admin) -> Response:
    return json_response(await _reply(admin, await admin.threads.read(admin.tenants.get, _name(request))))


@routes.admin(
    "PUT /tenants/{tenant}",
    "Make a tenant, or replace its settings",
    {201: TenantReply, 200: TenantReply},
    body=TenantRequest,
    errors=(409,),
)
async def put_tenant(request: Request, admin: Admin) -> Response:
    name = _name(request)
    body = await read_message(request, admin.config, TenantRequest)
    limits, hosts = body.limits or Limits(), tuple(body.webhook_hosts)
    try:
        parse_webhook_hosts(hosts)
    except ValueError as error:
        raise ServiceError("validation_failed", str(error), param="webhook_hosts") from None
    stored, created = await _change(
        admin,
        name,
        admin.tenants.replace,
        name,
        limits,
        body.slo,
        body.weight,
        webhook_hosts=hosts,
        file_bytes=body.file_bytes,
    )
    return json_response(await _reply(admin, stored), 201 if created else 200)


@routes.admin(
    "DELETE /tenants/{tenant}",
    "Delete a tenant: its keys end, then its functions are deleted",
    {204: None},
    errors=(409,),
)
async def delete_tenant(request: Request, admin: Admin) -> Response:
    name = _name(request)
    await _change(admin, name, tenant_removal.delete_tenant, admin.tenants, admin.registry, name)
    return Response(status_code=204)


@routes.admin(
    "POST /tenants/{tenant}/keys",
    "Make a key of a tenant, which is shown this once",
    {201: NewKeyReply},
    errors=(409,),
)
async def create_key(request: Request, admin: Admin) -> Response:
    name = request.path_params["tenant"]
    text, record = await admin.threads.write(admin.tenants.add_key, name)
    reply = NewKeyReply(tenant=name, key_id=record.key_id, key=text, created=record.created)
    return json_response(reply, 201, {"cache-control": "no-store"})


@routes.admin("DELETE /tenants/{tenant}/keys/{key_id}", "End a key within a second on every gateway", {204: None})
async def revoke_key(request: Request, admin: Admin) -> Response:
    name = request.path_params["tenant"]
    await _change(admin, name, admin.tenants.revoke_key, name, request.path_params["key_id"])
    return Response(status_code=204)


async def _change(admin: Admin, tenant: str, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns the result of `change`, and then invalidates the tenant's caches.

    That also happens if the change fails or its caller is cancelled, because the thread may still have made it.
    """
    try:
        return await admin.threads.write(change, *args, **kwargs)
    finally:
        admin.changes.tenant_changed(tenant)


def _name(request: Request) -> str:
    """Returns the tenant's name in the path. Raises NotFound if it is no valid name."""
    name: str = request.path_params["tenant"]
    if not is_name(name):
        raise NotFound(f"there is no tenant {name[:100]!r}: a tenant's name has {NAME_RULE}")
    return name


async def _reply(admin: Admin, tenant: Tenant) -> TenantReply:
    keys = [KeyItem(key.key_id, key.created, key.revoked) for key in tenant.keys]
    promised = tenant.slo.ttft_ms or tenant.slo.tpot_ms
    attained = await admin.windows.attainment(tenant.id) if promised else []
    windows = [
        Attainment(seconds, counts.calls, counts.share("ttft"), counts.share("tpot"), counts.share("all"))
        for seconds, counts in zip(WINDOWS_S, attained, strict=False)
    ]
    return TenantReply(
        id=tenant.id,
        slo=tenant.slo,
        limits=tenant.limits,
        weight=tenant.weight,
        webhook_hosts=list(tenant.webhook_hosts),
        file_bytes=tenant.file_bytes,
        declared=tenant.declared,
        keys=keys,
        attainment=windows,
    )
