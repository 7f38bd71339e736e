"""Routes /tenants/{id}/webhook-secrets: secrets that sign a tenant's webhooks, for administrators."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.events.webhook_secrets import add_secret, end_secret, list_secrets
from gateway.groups import Admin
from gateway.http.responses import json_response
from gateway.http.routing import Routes

routes = Routes(Admin)


class NewSecretReply(msgspec.Struct, frozen=True):
    """A new webhook secret. `secret` is shown only in this reply."""

    tenant: str
    secret_id: str
    secret: str
    created: float


class SecretItem(msgspec.Struct, frozen=True):
    """A webhook secret without its text, which is shown only when the secret is created."""

    secret_id: str
    created: float


class SecretsReply(msgspec.Struct, frozen=True):
    tenant: str
    secrets: list[SecretItem]


@routes.admin(
    "POST /tenants/{tenant}/webhook-secrets",
    "Make a secret that a tenant's webhooks are signed with, which is shown this once; two are valid at most",
    {201: NewSecretReply},
    errors=(409,),
)
async def create_webhook_secret(request: Request, admin: Admin) -> Response:
    tenant = request.path_params["tenant"]
    secret = await admin.threads.write(add_secret, admin.tenants, tenant)
    reply = NewSecretReply(tenant, secret.secret_id, secret.secret, secret.created)
    return json_response(reply, 201, {"cache-control": "no-store"})


@routes.admin("GET /tenants/{tenant}/webhook-secrets", "The valid secrets, without their text", {200: SecretsReply})
async def list_webhook_secrets(request: Request, admin: Admin) -> Response:
    tenant = request.path_params["tenant"]
    secrets = await admin.threads.read(list_secrets, admin.tenants, tenant)
    return json_response(SecretsReply(tenant, [SecretItem(each.secret_id, each.created) for each in secrets]))


@routes.admin("DELETE /tenants/{tenant}/webhook-secrets/{secret_id}", "End a webhook secret", {204: None})
async def end_webhook_secret(request: Request, admin: Admin) -> Response:
    tenant, secret_id = request.path_params["tenant"], request.path_params["secret_id"]
    await admin.threads.write(end_secret, admin.tenants, tenant, secret_id)
    return Response(status_code=204)
