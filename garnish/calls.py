"""Builds the requests of the service's HTTP interface, without any I/O.

`Client.ask` sends them, except requests for a file's content, which `Client.download` sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from garnish.adapter_folder import adapter_files
from garnish.errors import GarnishError
from garnish.hub import local_folder
from garnish.protocol import CALL_SECONDS, Call, waiting
from gateway.batches.messages import Endpoint
from gateway.residency.messages import WARM_SECONDS, Tier

SOURCE = "s3://"
Prompt = str | list[int] | list[dict[str, str]]
"""A prompt as text, as token ids, or as messages such as {"role": "user", "content": "Hello"}."""
AliasTarget = int | Mapping[int, float] | Mapping[str, float]
"""A version, or shares of the calls (summing to 1) by version."""
UPLOAD_SECONDS = 600.0


def _path(*parts: str) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in parts)


def _stated(**params: str | None) -> dict[str, str]:
    return {name: value for name, value in params.items() if value is not None}


def _flags(**flags: bool) -> dict[str, str]:
    """Returns query parameters for the flags that are True."""
    return {name: "true" for name, value in flags.items() if value}


def _condition(generation: int | None) -> dict[str, str]:
    return {} if generation is None else {"if-match": f'"{generation}"'}


# --- functions


def invoke_call(name: str, prompt: Prompt, stream: bool, options: dict[str, Any]) -> Call:
    """Returns the request that calls a function.

    `options` are other fields of the request's body by name, and `session`, which is sent as a header. Options that are
    None are not sent.
    """
    stated = {field: value for field, value in options.items() if value is not None}
    session = stated.pop("session", None)
    is_prompt = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))  # else messages
    body = {("prompt" if is_prompt else "messages"): prompt, **stated}
    if stream:
        body["stream"] = True
    seconds = stated.get("timeout")
    timeout = waiting(seconds if isinstance(seconds, int | float) else CALL_SECONDS)
    headers = {} if session is None else {"x-garnish-session": str(session)}
    return Call(method="POST", url=f"/invoke/{quote(name, safe=':')}", json=body, headers=headers, timeout=timeout)


@contextmanager
def deploy_call(name: str, adapter: str | Path, alias: str | None, dry_run: bool, warm: bool = False) -> Iterator[Call]:
    """Yields the request that deploys an adapter.

    `adapter` is a directory, `hf:org/name`, or `s3://bucket/prefix`. `hf:org/name` is downloaded from the Hugging Face
    Hub first.
    The directory's two files stay open while the request is sent. Raises GarnishError if `adapter` is none of these,
    or a file can't be read.
    """
    call = partial(
        Call,
        method="POST",
        url=_path("deploy", name),
        params=_flags(dry_run=dry_run, warm=warm),
        timeout=waiting(CALL_SECONDS + WARM_SECONDS),
    )
    if isinstance(adapter, str) and adapter.startswith(SOURCE):
        yield call(json={"source": adapter, **_stated(alias=alias)})
        return
    use = f"garnish deploy {name} {{}}"
    files = adapter_files(local_folder(adapter, use), use)
    try:
        with files.config.open("rb") as config, files.weights.open("rb") as weights:
            parts = {CONFIG_FILE: (CONFIG_FILE, config), WEIGHTS_FILE: (WEIGHTS_FILE, weights)}
            text_files = {name: (name, data) for name, data in files.text_files().items()}
            yield call(data=_stated(alias=alias), files=parts | text_files)
    except OSError as error:
        raise GarnishError("invalid_request", f"{adapter} can't be read: {error.strerror}") from None


def functions_call(limit: int = 100, after: str | None = None) -> Call:
    """Asks for a page of the tenant's functions. Pass the reply's `next` as `after` to get the next page."""
    return Call(method="GET", url="/functions", params=_stated(limit=str(limit), after=after or None))


def function_call(name: str) -> Call:
    return Call(method="GET", url=_path("functions", name))


def versions_call(name: str) -> Call:
    """Asks for the manifests of all versions of a function."""
    return Call(method="GET", url=_path("functions", name, "versions"))


def delete_call(name: str, force: bool = False) -> Call:
    """Deletes a function. New calls fail with `not_found` at once.

    Running calls finish; with `force` they are cancelled.
    """
    return Call(method="DELETE", url=_path("functions", name), params=_flags(force=force))


def delete_version_call(name: str, version: int) -> Call:
    """Deletes a version that no alias points to."""
    return Call(method="DELETE", url=_path("functions", name, "versions", str(version)))


def alias_call(name: str, alias: str) -> Call:
    """Asks for the current and earlier targets of an alias."""
    return Call(method="GET", url=_path("functions", name, "aliases", alias))


def set_alias_call(
    name: str, alias: str, target: AliasTarget, if_match: int | None = None, *, warm: bool = False
) -> Call:
    """Points an alias to a version, or splits its calls between several: `{3: 0.9, 4: 0.1}`.

    `if_match` is the `generation` of an earlier reply. If the function has changed since, the call fails with
    `precondition_failed`. With `warm` a node loads the adapter before the alias changes; the reply's `warnings` say if
    that took too long.
    """
    if isinstance(target, int):
        body: dict[str, Any] = {"version": target}
    else:
        body = {"weights": {str(version): share for version, share in target.items()}}
    return Call(
        method="PUT",
        url=_path("functions", name, "aliases", alias),
        params=_flags(warm=warm),
        json=body,
        headers=_condition(if_match),
        timeout=waiting(WARM_SECONDS),
    )


def rollback_call(name: str, alias: str = "latest", if_match: int | None = None, *, warm: bool = False) -> Call:
    """Points an alias to its previous target. Each further rollback goes back by one more target.

    `if_match` and `warm` are as in `set_alias_call`.
    """
    return Call(
        method="POST",
        url=_path("functions", name, "rollback"),
        params=_flags(warm=warm),
        json={"alias": alias},
        headers=_condition(if_match),
        timeout=waiting(WARM_SECONDS),
    )


def warm_call(name: str, version: str | None = None, *, tier: Tier = "device", copies: int = 1) -> Call:
    """Loads the adapters that calls of the function, version or alias would use, on its nodes, now.

    `version` is a version or an alias. `tier` is the memory to load into, and `copies` the number of nodes. Loading may
    continue after the reply, which says where each adapter is. Repeat the request to see the progress.
    """
    body = {"tier": tier, "copies": copies, **({} if version is None else {"version": version})}
    return Call(method="POST", url=_path("functions", name, "warm"), json=body)


def forecast_call(name: str) -> Call:
    """Asks whether calls of the function are expected soon, and which nodes should have its adapter loaded."""
    return Call(method="GET", url=_path("functions", name, "forecast"))


def policy_call(name: str, policy: Mapping[str, Any], if_match: int | None = None) -> Call:
    """Changes the fields of a function's policy that are in `policy`; None resets a field to its default.

    `if_match` is as in `set_alias_call`.
    """
    return Call(method="PATCH", url=_path("functions", name), json=dict(policy), headers=_condition(if_match))


# --- tenants


def tenant_call(tenant: str) -> Call:
    """Asks for a tenant's SLO, limits, weight and keys; needs an admin key."""
    return Call(method="GET", url=_path("tenants", tenant))


def put_tenant_call(tenant: str, settings: dict[str, Any]) -> Call:
    """Creates a tenant, or changes the settings of an existing one; needs an admin key."""
    return Call(method="PUT", url=_path("tenants", tenant), json=settings)


def usage_call(
    tenant: str | None = None, start: str | None = None, end: str | None = None, group_by: Sequence[str] | None = None
) -> Call:
    """Asks for the usage from `start` to `end`, summed per group.

    Times are ISO 8601 or Unix times; the default is the last 24 hours. `group_by` names any of tenant, function,
    version and hour. `tenant` needs an admin key; with such a key None means all tenants.
    """
    groups = None if group_by is None else ",".join(group_by)
    return Call(method="GET", url="/usage", params=_stated(tenant=tenant, **{"from": start}, to=end, group_by=groups))


def create_webhook_secret_call(tenant: str) -> Call:
    """Creates a webhook secret for the tenant; needs an admin key.

    The reply is gateway.routes.webhook_secrets.NewSecretReply.
    """
    return Call(method="POST", url=_path("tenants", tenant, "webhook-secrets"))


def webhook_secrets_call(tenant: str) -> Call:
    """Asks for the tenant's webhook secrets; needs an admin key.

    The reply is gateway.routes.webhook_secrets.SecretsReply.
    """
    return Call(method="GET", url=_path("tenants", tenant, "webhook-secrets"))


def end_webhook_secret_call(tenant: str, secret_id: str) -> Call:
    """Ends a webhook secret, so that it no longer signs webhooks; needs an admin key. The reply is empty."""
    return Call(method="DELETE", url=_path("tenants", tenant, "webhook-secrets", secret_id))


# --- asynchronous calls


def submit_call(name: str, prompt: Prompt, **options: Any) -> Call:
    """Submits an asynchronous call of a function. `event_call` and others take the `id` of the reply.

    `options` are those of `invoke`, and `on_success`, `on_failure` and `idempotency_key`. `on_success` and `on_failure`
    are {"webhook": URL} or {"function": NAME}. Submitting the same call again with the same `idempotency_key` returns
    the first event.
    """
    key = options.pop("idempotency_key", None)
    call = invoke_call(name, prompt, False, {**options, "background": True})
    if key is not None:
        call.headers["idempotency-key"] = key
    return call


def event_call(event_id: str) -> Call:
    """Asks for the state and attempts of an asynchronous call, and for its result if it has succeeded."""
    return Call(method="GET", url=_path("invocations", event_id))


def cancel_call(event_id: str) -> Call:
    return Call(method="DELETE", url=_path("invocations", event_id))


def redrive_call(event_id: str) -> Call:
    """Queues a dead letter (a call that has failed for good) again."""
    return Call(method="POST", url=_path("dead-letters", event_id, "redrive"))


def redrive_all_call(function: str | None = None) -> Call:
    """Queues up to 500 dead letters again, of one function or of all.

    The reply's `more` is true if more may remain.
    """
    return Call(method="POST", url="/dead-letters/redrive", params=_stated(function=function))


def events_call(
    function: str | None = None, state: str | None = None, limit: int = 20, after: str | None = None
) -> Call:
    """Asks for a page of the tenant's asynchronous calls. Pass the reply's `next` as `after` to get the next page."""
    params = _stated(function=function, state=state, limit=str(limit), after=after)
    return Call(method="GET", url="/invocations", params=params)


def dead_letters_call(function: str | None = None, limit: int = 20, after: str | None = None) -> Call:
    """Asks for a page of the tenant's dead letters: calls that have failed for good."""
    return Call(method="GET", url="/dead-letters", params=_stated(function=function, limit=str(limit), after=after))


# --- batches


@contextmanager
def upload_call(path: Path) -> Iterator[Call]:
    """Yields the request that uploads a file. The file stays open while the request is sent.

    The reply is gateway.batches.messages.FileObject. Raises GarnishError if the file can't be read.
    """
    try:
        with path.open("rb") as content:
            yield Call(
                method="POST",
                url="/v1/files",
                data={"purpose": "batch"},
                files={"file": (path.name, content)},
                timeout=waiting(UPLOAD_SECONDS),
            )
    except OSError as error:
        raise GarnishError("invalid_request", f"{path} can't be read: {error.strerror}") from None


def create_call(file_id: str, endpoint: Endpoint) -> Call:
    """Returns the request that creates a batch from an uploaded file.

    The reply is gateway.batches.messages.Batch, as for `batch_call`.
    """
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    return Call(method="POST", url="/v1/batches", json=body)


def batch_call(batch_id: str) -> Call:
    return Call(method="GET", url=_path("v1", "batches", batch_id))


def content_call(file_id: str) -> Call:
    return Call(method="GET", url=_path("v1", "files", file_id, "content"), timeout=waiting(UPLOAD_SECONDS))


# --- for operators; most need an admin key


def nodes_call() -> Call:
    """Asks for all nodes. The reply is gateway.routes.nodes.NodeList."""
    return Call(method="GET", url="/nodes")


def pools_call() -> Call:
    """Asks for the load of the pools. The reply is gateway.routes.pools.PoolList."""
    return Call(method="GET", url="/pools")


def lease_call(holder: str, seconds: float) -> Call:
    """Requests the autoscaler's lease for `seconds`; 0 releases it.

    The reply is gateway.routes.pools.LeaseReply.
    """
    return Call(method="PUT", url="/pools/autoscaler", json={"holder": holder, "seconds": seconds})


def node_adapters_call(node: str) -> Call:
    """Asks for the adapters that a node holds. The reply is gateway.routes.nodes.NodeAdapters."""
    return Call(method="GET", url=_path("nodes", node, "adapters"))


def explain_call(request_id: str) -> Call:
    """Asks how a request was routed. The reply is gateway.calls.explanations.ExplainReply."""
    return Call(method="GET", url=_path("explain", request_id))


def drain_call(node: str, drain: bool) -> Call:
    """Drains a node, or lets it serve again (`drain` False). The reply is gateway.routes.nodes.NodeItem."""
    return Call(method="POST", url=_path("nodes", node, "drain" if drain else "undrain"))


def move_call(node: str, action: str, function: str | None, digest: str | None) -> Call:
    """Prefetches an adapter to a node, or evicts the adapter from it.

    The adapter is given by `function` or by `digest`. `action` is "prefetch" or "evict". The reply is
    gateway.routes.nodes.MovedReply.
    """
    return Call(method="POST", url=_path("nodes", node, action), json=_stated(function=function, digest=digest))
