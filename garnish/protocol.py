"""Requests and replies of the service's HTTP interface, without any I/O: both clients share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from garnish.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, adapter_files
from garnish.connection import Connection
from garnish.errors import GarnishError
from garnish.hub import local_folder
from gateway.api import schema
from gateway.residency.messages import WARM_SECONDS, Tier

SOURCE = "s3://"
"""How an adapter's place begins that is no directory of ours."""
Prompt = str | list[int] | list[dict[str, str]]
"""A prompt, its token ids, or messages such as {"role": "user", "content": "Hello"}."""
AliasTarget = int | Mapping[int, float] | Mapping[str, float]
"""A version, or shares of the calls by version."""
CONNECT = 5.0
SHORT = 60.0
"""Seconds for what needs no computation; also the slack on top of what the service bounds."""
CALL_SECONDS = 600.0
"""The service's deadline of a call that states none, and of a deploy."""
Event = schema.TokenEvent | schema.DoneEvent
Reply = TypeVar("Reply")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, as keyword arguments of httpx's `build_request`."""

    method: str
    url: str
    params: dict[str, str] = {}
    headers: dict[str, str] = {}
    json: Any = None
    data: dict[str, str] | None = None
    files: Any = None
    timeout: httpx.Timeout = httpx.Timeout(SHORT, connect=CONNECT, pool=CONNECT)

    def arguments(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in fields.items() if value is not None}


def waiting(seconds: float) -> httpx.Timeout:
    """Returns a read timeout for a reply that the service bounds by `seconds` itself: long enough that its own answer
    comes first."""
    return httpx.Timeout(SHORT, connect=CONNECT, pool=CONNECT, read=seconds + SHORT)


def base_headers(connection: Connection) -> dict[str, str]:
    """Returns the headers of every request: the key, and the tenant for whom an administrator acts. Raises GarnishError
    for a key or tenant that no header can carry, such as a key that was copied with its `…`."""
    if not _can_be_sent(connection.key):
        problem = "no key has the characters of this one: copy it whole"
        raise GarnishError("unauthenticated", f"{problem} ({_key_used(connection)})")
    if not _can_be_sent(connection.tenant or ""):
        raise GarnishError("not_found", f"there is no tenant {connection.tenant!r}")
    headers = {"user-agent": "garnish-client"}
    if connection.key:
        headers["authorization"] = f"Bearer {connection.key}"
    if connection.tenant is not None:
        headers["x-garnish-tenant"] = connection.tenant
    return headers


def _can_be_sent(text: str) -> bool:
    return text.isascii() and text.isprintable()


def _is_prompt(prompt: Prompt) -> bool:
    """Whether `prompt` is a text or its token ids, and not messages."""
    return isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))


def invoke_call(name: str, prompt: Prompt, stream: bool, options: dict[str, Any]) -> Call:
    """Returns the request that calls a function. `options` are fields of the request by their names, and `session`, a
    header; None means not stated."""
    stated = {field: value for field, value in options.items() if value is not None}
    session = stated.pop("session", None)
    body = {("prompt" if _is_prompt(prompt) else "messages"): prompt, **stated}
    if stream:
        body["stream"] = True
    seconds = stated.get("timeout")
    timeout = waiting(seconds if isinstance(seconds, int | float) else CALL_SECONDS)
    headers = {} if session is None else {"x-garnish-session": str(session)}
    return Call(method="POST", url=f"/invoke/{quote(name, safe=':')}", json=body, headers=headers, timeout=timeout)


@contextmanager
def deploy_call(name: str, adapter: str | Path, alias: str | None, dry_run: bool, warm: bool = False) -> Iterator[Call]:
    """Provides the request that deploys an adapter. `adapter`: a directory, whose two files are kept open while the
    request is sent, `hf:org/name` on the Hugging Face Hub, which is fetched first, or `s3://bucket/prefix`.

    Raises GarnishError when it is none of these, or a file can't be read.
    """
    if isinstance(adapter, str) and adapter.startswith(SOURCE):
        yield Call(
            method="POST",
            url=f"/deploy/{quote(name, safe='')}",
            params=_flags(dry_run=dry_run, warm=warm),
            json={"source": adapter, **({} if alias is None else {"alias": alias})},
            timeout=waiting(CALL_SECONDS + WARM_SECONDS),
        )
        return
    use = f"garnish deploy {name} {{}}"
    files = adapter_files(local_folder(adapter, use), use)
    try:
        with files.config.open("rb") as config, files.weights.open("rb") as weights:
            yield Call(
                method="POST",
                url=f"/deploy/{quote(name, safe='')}",
                params=_flags(dry_run=dry_run, warm=warm),
                data={} if alias is None else {"alias": alias},
                files={CONFIG_FILE: (CONFIG_FILE, config), WEIGHTS_FILE: (WEIGHTS_FILE, weights)},
                timeout=waiting(CALL_SECONDS + WARM_SECONDS),
            )
    except OSError as error:
        raise GarnishError("invalid_request", f"{adapter} can't be read: {error.strerror}") from None


def functions_call(limit: int = 100, after: str | None = None) -> Call:
    """Asks for a page of the tenant's functions; `next` of the reply is `after` of the next page."""
    return Call(method="GET", url="/functions", params={"limit": str(limit), **({"after": after} if after else {})})


def function_call(name: str) -> Call:
    return Call(method="GET", url=f"/functions/{quote(name, safe='')}")


def versions_call(name: str) -> Call:
    """Asks for the manifests of all versions of a function."""
    return Call(method="GET", url=f"/functions/{quote(name, safe='')}/versions")


def tenant_call(tenant: str) -> Call:
    """Asks for a tenant's SLO, limits, weight and keys; needs an admin key."""
    return Call(method="GET", url=f"/tenants/{quote(tenant, safe='')}")


def put_tenant_call(tenant: str, settings: dict[str, Any]) -> Call:
    """Makes a tenant, or gives it these settings; needs an admin key."""
    return Call(method="PUT", url=f"/tenants/{quote(tenant, safe='')}", json=settings)


def delete_call(name: str, force: bool) -> Call:
    return Call(method="DELETE", url=f"/functions/{quote(name, safe='')}", params={"force": "true"} if force else {})


def delete_version_call(name: str, version: int) -> Call:
    return Call(method="DELETE", url=f"/functions/{quote(name, safe='')}/versions/{version}")


def alias_call(name: str, alias: str) -> Call:
    """Asks where an alias points, and where it pointed before."""
    return Call(method="GET", url=_alias_url(name, alias))


def set_alias_call(
    name: str, alias: str, target: AliasTarget, if_match: int | None = None, *, warm: bool = False
) -> Call:
    """Points an alias to a version, or to several: `{3: 0.9, 4: 0.1}`.

    `if_match`, here and below: the `generation` of an earlier reply; `precondition_failed` when the function has
    changed since. `warm`, here and below: a node loads the adapter before calls come; the reply's `warnings` say when
    that took too long.
    """
    if isinstance(target, int):
        body: dict[str, Any] = {"version": target}
    else:
        body = {"weights": {str(version): share for version, share in target.items()}}
    return Call(
        method="PUT",
        url=_alias_url(name, alias),
        params=_flags(warm=warm),
        json=body,
        headers=_condition(if_match),
        timeout=waiting(WARM_SECONDS),
    )


def rollback_call(name: str, alias: str = "latest", if_match: int | None = None, *, warm: bool = False) -> Call:
    """Points an alias to what it pointed to before; again: one further back."""
    return Call(
        method="POST",
        url=f"/functions/{quote(name, safe='')}/rollback",
        params=_flags(warm=warm),
        json={"alias": alias},
        headers=_condition(if_match),
        timeout=waiting(WARM_SECONDS),
    )


def warm_call(name: str, version: str | None = None, *, tier: Tier = "device", copies: int = 1) -> Call:
    """Brings what calls of the function would run (or a version, or an alias's) to its nodes now. Loads may still go on
    when it returns: the reply says where each is, and the same call again where it is then."""
    body = {"tier": tier, "copies": copies, **({} if version is None else {"version": version})}
    return Call(method="POST", url=f"/functions/{quote(name, safe='')}/warm", json=body)


def forecast_call(name: str) -> Call:
    """Asks whether calls of the function are expected soon, and which nodes are asked to have it ready."""
    return Call(method="GET", url=f"/functions/{quote(name, safe='')}/forecast")


def _flags(**flags: bool) -> dict[str, str]:
    """Returns the query parameters of the flags that are set: an older service does not know them all."""
    return {name: "true" for name, value in flags.items() if value}


def policy_call(name: str, policy: Mapping[str, Any], if_match: int | None = None) -> Call:
    """Changes the stated fields of a function's policy; None sets a field back to its default."""
    url = f"/functions/{quote(name, safe='')}"
    return Call(method="PATCH", url=url, json=dict(policy), headers=_condition(if_match))


def _alias_url(name: str, alias: str) -> str:
    return f"/functions/{quote(name, safe='')}/aliases/{quote(alias, safe='')}"


def _condition(generation: int | None) -> dict[str, str]:
    return {} if generation is None else {"if-match": f'"{generation}"'}


def usage_call(
    tenant: str | None = None, start: str | None = None, end: str | None = None, group_by: Sequence[str] | None = None
) -> Call:
    """Asks for sums of what was used from `start` to `end` (ISO 8601 or Unix time; by default the last 24 hours).

    `group_by`: of tenant, function, version, hour. With an admin key `tenant` says whose; None: of all.
    """
    stated = {"tenant": tenant, "from": start, "to": end, "group_by": None if group_by is None else ",".join(group_by)}
    return Call(method="GET", url="/usage", params={name: value for name, value in stated.items() if value is not None})


def parse(reply: httpx.Response, kind: type[Reply], connection: Connection) -> Reply:
    """Returns the typed content of a reply that was read. Raises GarnishError for an error and for what is no reply of
    a Garnish service."""
    if not reply.is_success:
        raise error_of(reply, connection)
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except msgspec.DecodeError as error:
        problem = (
            f"the reply of {_address(reply)} is not understood: is it a Garnish service of this version? ({error})"
        )
        raise GarnishError("internal", problem) from error


def _address(reply: httpx.Response) -> str:
    """Returns the URL that was asked, without path and query."""
    return str(reply.url.copy_with(raw_path=b"/")).rstrip("/")


def error_of(reply: httpx.Response, connection: Connection) -> GarnishError:
    """Returns what an error reply says; its content must have been read."""
    try:
        told = msgspec.json.decode(reply.content, type=schema.ErrorReply).error
    except msgspec.DecodeError:
        message = (
            f"{_address(reply)} answered {reply.status_code}, but not as a Garnish service does: is the address right?"
        )
        return GarnishError("internal", message, status=reply.status_code)
    if reply.status_code == 401:
        told = msgspec.structs.replace(told, message=f"{told.message} ({_key_used(connection)})")
    retry_after = reply.headers.get("retry-after", "")
    return _error(told, reply.status_code, float(retry_after) if retry_after.isdecimal() else None)


def _key_used(connection: Connection) -> str:
    if connection.key:
        return f"the one that was sent: {connection.key_from}"
    return (
        f"none is known for {connection.url}: set GARNISH_API_KEY, or name the service's state directory with --state"
    )


def _error(told: schema.ErrorContent, status: int, retry_after: float | None = None) -> GarnishError:
    details = [msgspec.to_builtins(entry) for entry in told.details]
    return GarnishError(
        told.type,
        told.message,
        param=told.param,
        details=details,
        request_id=told.request_id,
        status=status,
        retry_after=retry_after,
    )


def _decode(content: bytes, kind: type[Reply]) -> Reply:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise GarnishError("internal", f"the service's reply is not understood: {error}") from error


class EventReader:
    """Reads server-sent events, line by line. Comments keep idle connections alive and carry nothing."""

    def __init__(self) -> None:
        self._name = ""
        self._data: list[str] = []
        self.finished = False
        """Whether `done` came: a stream that ends without it broke off."""

    def line(self, line: str) -> Event | None:
        """Returns the event that this line completes; None when it completes none. Raises GarnishError for an `error`
        event."""
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
            return None
        name, data = self._name, "\n".join(self._data).encode()
        self._name, self._data = "", []
        match name:
            case "token":
                return _decode(data, schema.TokenEvent)
            case "done":
                self.finished = True
                return _decode(data, schema.DoneEvent)
            case "error":
                raise _error(_decode(data, schema.ErrorReply).error, status=0)
        return None

    def end(self) -> None:
        """Ends the stream. Raises GarnishError when it broke off before its `done` event."""
        if not self.finished:
            raise GarnishError("node_failed", "the stream ended before its `done` event")
