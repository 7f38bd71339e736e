"""Headers, replies and events of the service's HTTP interface, without any I/O. Both clients use them."""

from __future__ import annotations

from types import NoneType
from typing import Any, TypeVar

import httpx
import msgspec

from garnish.credentials import Connection
from garnish.errors import GarnishError
from gateway.api import schema

CONNECT = 5.0
SHORT = 60.0
"""Timeout in seconds for requests without computation. For other requests it is added to the service's timeout."""
CALL_SECONDS = 600.0
Event = schema.TokenEvent | schema.DoneEvent
Reply = TypeVar("Reply")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request. The fields are keyword arguments of httpx's `build_request`."""

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
    """Returns a timeout longer than `seconds`, the service's own timeout, so that the service's reply comes first."""
    return httpx.Timeout(SHORT, connect=CONNECT, pool=CONNECT, read=seconds + SHORT)


def base_headers(connection: Connection) -> dict[str, str]:
    """Returns the headers that all requests have: the key, and the tenant on whose behalf an administrator acts.

    Raises GarnishError for a key or tenant with characters that no header may contain, such as a key copied with `…`.
    """
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


def parse(reply: httpx.Response, kind: type[Reply], connection: Connection) -> Reply:
    """Returns the content of a reply as `kind`; for an empty reply `kind` is NoneType.

    The content must have been read. Raises GarnishError for an error reply, and for a reply that does not come from a
    Garnish service.
    """
    if not reply.is_success:
        raise error_of(reply, connection)
    try:
        return msgspec.json.decode(b"null" if kind is NoneType else reply.content, type=kind)
    except msgspec.DecodeError as error:
        problem = f"the reply of {_address(reply)} can't be decoded: is it a Garnish service of this version? ({error})"
        raise GarnishError("internal", problem) from error


def _address(reply: httpx.Response) -> str:
    """Returns the URL of the reply's request, without path and query."""
    return str(reply.url.copy_with(raw_path=b"/")).rstrip("/")


def error_of(reply: httpx.Response, connection: Connection) -> GarnishError:
    """Returns an error reply as a GarnishError. The reply's content must have been read."""
    try:
        content = msgspec.json.decode(reply.content, type=schema.ErrorReply).error
    except msgspec.DecodeError:
        message = (
            f"{_address(reply)} answered {reply.status_code}, but not as a Garnish service does: is the address right?"
        )
        return GarnishError("internal", message, status=reply.status_code)
    if reply.status_code == 401:
        content = msgspec.structs.replace(content, message=f"{content.message} ({_key_used(connection)})")
    retry_after = reply.headers.get("retry-after", "")
    return _error(content, reply.status_code, float(retry_after) if retry_after.isdecimal() else None)


def _key_used(connection: Connection) -> str:
    if connection.key:
        return f"the one that was sent: {connection.key_from}"
    return (
        f"none is known for {connection.url}: set GARNISH_API_KEY, or name the service's state directory with --state"
    )


def _error(content: schema.ErrorContent, status: int, retry_after: float | None = None) -> GarnishError:
    details = [msgspec.to_builtins(entry) for entry in content.details]
    return GarnishError(
        content.type,
        content.message,
        param=content.param,
        details=details,
        request_id=content.request_id,
        status=status,
        retry_after=retry_after,
    )


def _decode(content: bytes, kind: type[Reply]) -> Reply:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise GarnishError("internal", f"the service's reply can't be decoded: {error}") from error


class EventReader:
    """Parses server-sent events line by line. Comments, which keep idle connections open, are skipped."""

    def __init__(self) -> None:
        self._name = ""
        self._data: list[str] = []
        self.finished = False
        """True after the `done` event; a stream that ends without this event is incomplete"""

    def feed_line(self, line: str) -> Event | None:
        """Returns the event that this line completes, or None. Raises GarnishError for an `error` event."""
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
        """Must be called at the end of the stream. Raises GarnishError if there was no `done` event."""
        if not self.finished:
            raise GarnishError("node_failed", "the stream ended before its `done` event")
