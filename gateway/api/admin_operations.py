"""The routes for tenants and usage as openapi.json lists them."""

from __future__ import annotations

from gateway.api import admin_schema as schema
from gateway.http.operations import NAME_TEXT, Operation, parameter

_ERRORS = (401, 403, 404, 422, 429, 500, 503)
_CHANGE = (401, 403, 404, 409, 422, 429, 500, 503)

_ID = parameter("path", "tenant", "The tenant", NAME_TEXT)
_TIME = "Unix time, or ISO 8601 (UTC where it names no zone); widened to whole hours"

ADMIN_OPERATIONS = (
    Operation(
        method="put",
        path="/tenants/{tenant}",
        id="putTenant",
        summary="Make a tenant, or replace its limits; admin key",
        parameters=(_ID,),
        body=schema.TenantRequest,
        replies={201: schema.TenantReply, 200: schema.TenantReply},
        errors=(400, 413, 415, *_CHANGE),
    ),
    Operation(
        method="get",
        path="/tenants/{tenant}",
        id="getTenant",
        summary="A tenant: limits, and its keys without their text; admin key",
        parameters=(_ID,),
        replies={200: schema.TenantReply},
        errors=_ERRORS,
    ),
    Operation(
        method="delete",
        path="/tenants/{tenant}",
        id="deleteTenant",
        summary="Delete a tenant: its keys end, then its functions are deleted; admin key",
        parameters=(_ID,),
        replies={204: None},
        errors=_CHANGE,
    ),
    Operation(
        method="post",
        path="/tenants/{tenant}/keys",
        id="createKey",
        summary="Make a key of a tenant, which is shown this once; admin key",
        parameters=(_ID,),
        replies={201: schema.NewKeyReply},
        errors=_CHANGE,
    ),
    Operation(
        method="delete",
        path="/tenants/{tenant}/keys/{key_id}",
        id="revokeKey",
        summary="End a key within a second on every gateway; admin key",
        parameters=(_ID, parameter("path", "key_id", "Its id")),
        replies={204: None},
        errors=_ERRORS,
    ),
    Operation(
        method="get",
        path="/usage",
        id="getUsage",
        summary="Requests, tokens and cold starts of the caller's tenant; with an admin key of any, or of all",
        parameters=(
            parameter("query", "tenant", "With an admin key: whose (all tenants, when absent)"),
            parameter("query", "from", f"{_TIME}, 366 days before `to` at most. Default: 24 hours before `to`"),
            parameter("query", "to", f"{_TIME}. Default: now"),
            parameter("query", "group_by", "Of tenant, function, version, hour; several by commas. Default: function"),
            parameter("header", "x-garnish-tenant", "As `tenant`"),
        ),
        replies={200: schema.UsageReply},
        errors=_ERRORS,
    ),
)
