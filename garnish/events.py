"""Requests about asynchronous calls, for both clients and the command line: `Client.ask` sends them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from garnish.protocol import Call, Prompt, invoke_call


def submit_call(name: str, prompt: Prompt, **options: Any) -> Call:
    """Calls a function without waiting for it; the reply's `id` is what the other methods want.

    `options` are those of `invoke`, `on_success` and `on_failure` ({"webhook": URL} or {"function": NAME}), and
    `idempotency_key`: the same key with the same call gives the same event.
    """
    key = options.pop("idempotency_key", None)
    call = invoke_call(name, prompt, False, {**options, "background": True})
    if key is not None:
        call.headers["idempotency-key"] = key
    return call


def event_call(event_id: str) -> Call:
    """Asks for a call's state, attempts and, once it has succeeded, its result."""
    return Call(method="GET", url=f"/invocations/{quote(event_id, safe='')}")


def cancel_call(event_id: str) -> Call:
    return Call(method="DELETE", url=f"/invocations/{quote(event_id, safe='')}")


def redrive_call(event_id: str) -> Call:
    """Queues a dead letter again."""
    return Call(method="POST", url=f"/dead-letters/{quote(event_id, safe='')}/redrive")


def redrive_all_call(function: str | None = None) -> Call:
    """Queues up to 500 dead letters again, of one function or of all; `more` of the reply says whether there may be
    others."""
    return Call(method="POST", url="/dead-letters/redrive", params=_stated(function=function))


def events_call(
    function: str | None = None, state: str | None = None, limit: int = 20, after: str | None = None
) -> Call:
    """Asks for a page of the tenant's asynchronous calls; `next` of the reply is `after` of the next page."""
    params = _stated(function=function, state=state, limit=str(limit), after=after)
    return Call(method="GET", url="/invocations", params=params)


def dead_letters_call(function: str | None = None, limit: int = 20, after: str | None = None) -> Call:
    """Asks for a page of the calls that failed for good."""
    return Call(method="GET", url="/dead-letters", params=_stated(function=function, limit=str(limit), after=after))


def webhook_secret_call(tenant: str) -> Call:
    """Makes a webhook secret for the tenant; needs an admin key. The reply is
    gateway.routes.webhook_secrets.NewSecretReply."""
    return Call(method="POST", url=f"/tenants/{quote(tenant, safe='')}/webhook-secrets")


def webhook_secrets_call(tenant: str) -> Call:
    """Asks for the tenant's webhook secrets; needs an admin key. The reply is
    gateway.routes.webhook_secrets.SecretsReply."""
    return Call(method="GET", url=f"/tenants/{quote(tenant, safe='')}/webhook-secrets")


def end_webhook_secret_call(tenant: str, secret_id: str) -> Call:
    """Ends a webhook secret; needs an admin key. The reply is empty."""
    url = f"/tenants/{quote(tenant, safe='')}/webhook-secrets/{quote(secret_id, safe='')}"
    return Call(method="DELETE", url=url)


def _stated(**params: str | None) -> dict[str, str]:
    return {name: value for name, value in params.items() if value is not None}
