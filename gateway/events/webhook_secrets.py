"""Tenants' webhook secrets. Two may be valid at once, so that receivers can change from the old one to the new one."""

from __future__ import annotations

import base64
import secrets

import msgspec

from adapters.errors import Conflict, NotFound
from adapters.records import read_record, update_record
from adapters.store import ObjectStore
from adapters.tenants import Tenants

MAX_SECRETS = 2
SECRET_BYTES = 32


class WebhookSecret(msgspec.Struct, frozen=True):
    secret_id: str
    secret: str
    """Secret: `whsec_` and base64, as in Standard Webhooks. It is stored in plain text, because signing needs it."""
    created: float


class WebhookSecrets(msgspec.Struct, frozen=True):
    """Content of tenants/<tenant>/webhook_secrets.json. This is a separate record, so that no reply about a tenant
    shows the secrets."""

    secrets: tuple[WebhookSecret, ...] = ()


def read_secrets(store: ObjectStore, tenant: str) -> tuple[WebhookSecret, ...]:
    """Returns the tenant's secrets. Raises StoreUnavailable."""
    pair = read_record(store, _key(tenant), WebhookSecrets)
    return pair[0].secrets if pair else ()


def list_secrets(tenants: Tenants, tenant: str) -> tuple[WebhookSecret, ...]:
    """Returns the tenant's secrets. Raises NotFound without the tenant, StoreUnavailable."""
    tenants.get(tenant)
    return read_secrets(tenants.store, tenant)


def add_secret(tenants: Tenants, tenant: str) -> WebhookSecret:
    """Creates a secret and returns it. Raises NotFound if the tenant does not exist, Conflict if two secrets are valid
    already."""
    tenants.get(tenant)
    text = base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
    new = WebhookSecret(secrets.token_hex(8), f"whsec_{text}", tenants.store.now())

    def add(record: WebhookSecrets | None) -> WebhookSecrets:
        current = record.secrets if record else ()
        if len(current) >= MAX_SECRETS:
            raise Conflict(f"tenant {tenant} has {MAX_SECRETS} webhook secrets already; end one first")
        return WebhookSecrets((*current, new))

    update_record(tenants.store, _key(tenant), WebhookSecrets, add)
    return new


def end_secret(tenants: Tenants, tenant: str, secret_id: str) -> None:
    """Removes a secret. Raises NotFound."""
    tenants.get(tenant)

    def end(record: WebhookSecrets | None) -> WebhookSecrets:
        current = record.secrets if record else ()
        remaining = tuple(each for each in current if each.secret_id != secret_id)
        if len(remaining) == len(current):
            raise NotFound(f"there is no webhook secret {secret_id[:100]!r}")
        return WebhookSecrets(remaining)

    update_record(tenants.store, _key(tenant), WebhookSecrets, end)


def _key(tenant: str) -> str:
    return f"tenants/{tenant}/webhook_secrets.json"
