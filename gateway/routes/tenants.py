"""/tenants/{id} and its keys, for administrators."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from adapters.errors import NotFound
from adapters.names import NAME_RULE, is_name
from adapters.tenant_removal import delete_tenant
from adapters.tenants import Limits, Tenant
from gateway.api import admin_schema as schema
from gateway.http.bodies import decode_json, read_body, require_json
from gateway.http.params import known_only
from gateway.http.responses import json_response
from gateway.http.routing import ExactRoute
from gateway.services import Services, services_of
from gateway.workers.attainment import WINDOWS


async def tenant(request: Request) -> Response:
    """One route for all methods, so that a 405 names them."""
    services = services_of(request)
    await services.callers.admin(request)
    known_only(request)
    name = request.path_params["tenant"]
    if not is_name(name):
        raise NotFound(f"there is no tenant {name[:100]!r}: a tenant's name has {NAME_RULE}")
    if request.method == "PUT":
        return await _put(services, request, name)
    if request.method == "DELETE":
        return await _delete(services, name)
    return json_response(await _reply(services, await services.threads.read(services.tenants.get, name)))


async def _put(services: Services, request: Request, name: str) -> Response:
    require_json(request)
    config = services.config
    data = await read_body(request, config.call_body, config.body_seconds, config.body_idle_seconds)
    asked = decode_json(data, schema.TenantRequest)
    try:
        made, created = await services.threads.write(
            services.tenants.replace, name, asked.limits or Limits(), asked.slo, asked.weight
        )
    finally:
        services.tenant_changed(name)
    return json_response(await _reply(services, made), 201 if created else 200)


async def _delete(services: Services, name: str) -> Response:
    try:
        await services.threads.write(delete_tenant, services.tenants, services.registry, name)
    finally:
        services.tenant_changed(name)
    return Response(status_code=204)


async def add_key(request: Request) -> Response:
    services = services_of(request)
    await services.callers.admin(request)
    known_only(request)
    name = request.path_params["tenant"]
    text, record = await services.threads.write(services.tenants.add_key, name)
    made = schema.NewKeyReply(tenant=name, key_id=record.key_id, key=text, created=record.created)
    return json_response(made, 201, {"cache-control": "no-store"})


async def revoke_key(request: Request) -> Response:
    services = services_of(request)
    await services.callers.admin(request)
    known_only(request)
    name = request.path_params["tenant"]
    try:
        await services.threads.write(services.tenants.revoke_key, name, request.path_params["key_id"])
    finally:
        services.tenant_changed(name)
    return Response(status_code=204)


async def _reply(services: Services, tenant: Tenant) -> schema.TenantReply:
    keys = [schema.KeyItem(key.key_id, key.created, key.revoked) for key in tenant.keys]
    promised = tenant.slo.ttft_ms or tenant.slo.tpot_ms
    attained = await services.windows.attainment(tenant.id) if promised else []
    windows = [
        schema.Attainment(seconds, kept.calls, kept.share("ttft"), kept.share("tpot"), kept.share("all"))
        for seconds, kept in zip(WINDOWS, attained, strict=False)
    ]
    return schema.TenantReply(tenant.id, tenant.slo, tenant.limits, tenant.weight, tenant.declared, keys, windows)


routes = [
    ExactRoute("/tenants/{tenant}", tenant, methods=["GET", "PUT", "DELETE"]),
    ExactRoute("/tenants/{tenant}/keys", add_key, methods=["POST"]),
    ExactRoute("/tenants/{tenant}/keys/{key_id}", revoke_key, methods=["DELETE"]),
]
