"""Reads request bodies, limited in size and time, and parses their JSON strictly."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import msgspec.inspect
from starlette.requests import Request

from adapters import strict_json
from adapters.nearest import did_you_mean
from cluster.errors import ServiceError
from gateway.config import GatewayConfig
from gateway.http.content_encoding import check_plain, inflate, is_gzip
from gateway.http.errors import ClientGone, invalid
from gateway.http.openai_codes import code_of_mismatch
from gateway.places.places import owner_now
from gateway.places.pools import hold_place

T = TypeVar("T")

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*?)(?:\[\.\.\.\])*`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`|missing required field `([^`]*)`")
LARGE_BODY = 64 << 10
MAX_NESTING = 200
"""Maximum depth of objects and lists in a body."""


async def stream_body(request: Request, limit: int, seconds: float, idle_seconds: float) -> AsyncGenerator[bytes, None]:
    """Yields the chunks of a body that is not compressed.

    Raises ServiceError: `too_large` over `limit` bytes, `unsupported_media_type` if it is compressed, `invalid_request`
    if it takes longer than `seconds`, or one pause longer than `idle_seconds`. Raises ClientGone if its sender
    disconnects.
    """
    check_plain(request)
    async for chunk in _stream_as_sent(request, limit, seconds, idle_seconds):
        yield chunk


async def _stream_as_sent(
    request: Request, limit: int, seconds: float, idle_seconds: float
) -> AsyncGenerator[bytes, None]:
    stated = request.headers.get("content-length", "0")
    if stated.isdigit() and int(stated) > limit:
        raise _too_large(limit)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    size = 0
    while True:
        try:
            async with asyncio.timeout_at(min(deadline, loop.time() + idle_seconds)):
                message = await request.receive()
        except TimeoutError:
            raise ServiceError(
                "invalid_request",
                f"the body did not arrive in time (at most {seconds:g} s in all, pauses of at most {idle_seconds:g} s)",
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        if chunk:
            yield chunk
        if not message.get("more_body", False):
            return


async def read_body(request: Request, limit: int, seconds: float, idle_seconds: float) -> bytes:
    """Returns a body, which may be gzip, within the limits of `stream_body`. `limit` also bounds what gzip holds."""
    is_compressed = is_gzip(request)
    body = b"".join([chunk async for chunk in _stream_as_sent(request, limit, seconds, idle_seconds)])
    return _inflated(body, limit) if is_compressed else body


def _inflated(data: bytes, limit: int) -> bytes:
    """Returns the content of gzip data. Raises ServiceError, `too_large` if it has more than `limit` bytes."""
    body = inflate(data, limit)
    if len(body) > limit:
        raise _too_large(limit)
    return body


async def read_call_body(request: Request, config: GatewayConfig) -> bytes:
    """Returns the bytes of a call's JSON body, which must keep the limits for calls. A body without a content type is
    taken for JSON.

    A body over LARGE_BODY bytes holds a place of the pool `large_bodies` until the end of the reply. Until then
    the request keeps it in memory. Raises ServiceError, also for another content type and without a free place.
    """
    type_of_body = media_type(request)
    if type_of_body not in ("", "application/json"):
        raise ServiceError("unsupported_media_type", f"send content-type: application/json, not {type_of_body[:100]}")
    is_compressed = is_gzip(request)
    chunks: list[bytes] = []
    size = 0
    async for chunk in _stream_as_sent(request, config.call_body, config.body_seconds, config.body_idle_seconds):
        if size <= LARGE_BODY < size + len(chunk):
            hold_place(request, "large_bodies", owner_now.get())
        size += len(chunk)
        chunks.append(chunk)
    if not is_compressed:
        return b"".join(chunks)
    body = _inflated(b"".join(chunks), config.call_body)
    if size <= LARGE_BODY < len(body):
        hold_place(request, "large_bodies", owner_now.get())
    return body


async def read_message(request: Request, config: GatewayConfig, kind: type[T], *, absent: bytes = b"") -> T:
    """Returns the JSON body of a call decoded as `kind`; an empty body is decoded as `absent`.

    Raises ServiceError: `invalid_request` if it is not JSON, `validation_failed` with the field in `param` if it does
    not match.
    """
    return convert(parse_json(await read_call_body(request, config) or absent), kind)


def _too_large(limit: int) -> ServiceError:
    return ServiceError("too_large", f"the body is larger than {limit} bytes")


def parse_json(data: bytes) -> Any:
    """Returns the parsed JSON. Raises ServiceError `invalid_request`, also if it is nested so deeply that other code
    could not walk through it."""
    try:
        value = strict_json.loads(data)
    except strict_json.InvalidJson as error:
        raise ServiceError("invalid_request", f"the body is not valid JSON: {error}") from None
    if data.count(b"{") + data.count(b"[") > MAX_NESTING and _is_deeper(value, MAX_NESTING):
        raise ServiceError("invalid_request", f"the body is nested more than {MAX_NESTING} levels deep")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    level: list[Any] = [value] if isinstance(value, (dict, list)) else []
    for _ in range(levels):
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for each in members for inner in each if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def convert(value: Any, kind: type[T]) -> T:
    """Returns `value` converted to the message type `kind`. Raises ServiceError if it does not match."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = _PATH.sub("", str(error)) + _meant_field(str(error), kind)
        raise invalid(field_of(str(error)), message, code_of_mismatch(message)) from None
    except RecursionError:
        raise ServiceError("invalid_request", "the body is not valid JSON: it is nested too deeply") from None


def field_of(message: str) -> str | None:
    """Returns the path of the field that a msgspec error names, such as `messages[0].role`; None if the error names no
    field."""
    path = _PATH.search(message)
    unknown = _UNKNOWN.search(message)
    parts = [path.group(1) if path else "", next(filter(None, unknown.groups()), "") if unknown else ""]
    return ".".join(part for part in parts if part) or None


def _meant_field(message: str, kind: Any) -> str:
    """Returns text that suggests a known field if a msgspec error names a similar unknown one; otherwise an empty
    string."""
    unknown = _UNKNOWN.search(message)
    if unknown is None or unknown.group(1) is None:
        return ""
    path = _PATH.search(message)
    steps = re.findall(r"[^.\[\]]+", path.group(1)) if path else []
    return did_you_mean(unknown.group(1), fields_at(kind, tuple(step for step in steps if step != "...")))


@lru_cache(maxsize=256)
def fields_at(kind: Any, path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the field names of the message type `kind`, or of the messages inside it at `path`."""
    inside: list[Any] = [msgspec.inspect.type_info(kind)]
    for step in path:
        inside = [
            field.type for struct in _structs(inside) for field in struct.fields if field.encode_name == step
        ] or inside
    return tuple(field.encode_name for struct in _structs(inside) for field in struct.fields)


def _structs(types: Iterable[Any]) -> list[msgspec.inspect.StructType]:
    """Returns the message types among `types`, including members of unions and lists."""
    structs: list[msgspec.inspect.StructType] = []
    for kind in types:
        match kind:
            case msgspec.inspect.StructType():
                structs.append(kind)
            case msgspec.inspect.UnionType():
                structs += _structs(kind.types)
            case msgspec.inspect.CollectionType():
                structs += _structs([kind.item_type])
    return structs


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()
