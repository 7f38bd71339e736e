"""Short queries and commands to one node, each bounded in time and in the size of its answer."""

from __future__ import annotations

from typing import Any, TypeVar

import aiohttp
import msgspec

from cluster.errors import STATUS, ServiceError
from cluster.news import NodeRecord
from cluster.secret import authorization

T = TypeVar("T")

ANSWER_SECONDS = 15.0
"""Timeout of a node's answer in seconds. It is longer than the node's own timeout for its engine."""
ANSWER_BYTES = 8 << 20
OUR_FAULT = ("unauthenticated", "invalid_request", "method_not_allowed", "unsupported_media_type")
"""Errors of a node which mean that gateway and node do not understand each other. The operator who sent the request
can't fix them."""


class _ErrorContent(msgspec.Struct, frozen=True):
    type: str
    message: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _ErrorContent


class NodeCalls:
    def __init__(self, session: aiohttp.ClientSession, secret: str, *, connect: float) -> None:
        self._session = session
        self._headers = {**authorization(secret), "content-type": "application/msgpack"}
        self._timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=connect)

    async def ask(
        self, node: NodeRecord, path: str, kind: type[T], order: msgspec.Struct | None = None
    ) -> tuple[int, T]:
        """Sends a GET, or a POST with an order. Returns the status, and the answer decoded as `kind`.

        Raises ServiceError with the node's error, or `node_failed`.
        """
        method = "GET" if order is None else "POST"
        status, body = await self._call(node, method, path, b"" if order is None else msgspec.msgpack.encode(order))
        try:
            return status, msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise _failed(node, f"sent an invalid answer ({error})") from error

    async def order(self, node: NodeRecord, path: str, order: msgspec.Struct | None = None) -> None:
        """Sends a POST whose answer is ignored. Raises the same errors as `ask`."""
        status, body = await self._exchange(node, "POST", path, b"" if order is None else msgspec.msgpack.encode(order))
        if status >= 300:
            raise _refusal(node, status, body)

    async def _call(self, node: NodeRecord, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        status, answer = await self._exchange(node, method, path, body)
        if status >= 300:
            raise _refusal(node, status, answer)
        return status, answer

    async def _exchange(self, node: NodeRecord, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Returns the status and body of the answer, whatever the status. Raises ServiceError if the node can't be
        reached."""
        options: dict[str, Any] = {"headers": self._headers, "timeout": self._timeout, "allow_redirects": False}
        try:
            async with self._session.request(method, node.url + path, data=body, **options) as response:
                answer = bytearray()
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > ANSWER_BYTES:
                        raise _failed(node, f"answered with more than {ANSWER_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(node, f"could not be reached ({type(error).__name__})") from error
        return response.status, bytes(answer)


def _refusal(node: NodeRecord, status: int, body: bytes) -> ServiceError:
    try:
        error = msgspec.json.decode(body, type=_Refusal).error
    except msgspec.DecodeError:
        return _failed(node, f"answered with status {status}")
    if error.type not in STATUS or error.type in OUR_FAULT:
        return _failed(node, f"refused the gateway ({error.type[:50]})")
    return ServiceError(error.type, error.message, retry_after=1.0 if STATUS[error.type] in (429, 503) else None)


def _failed(node: NodeRecord, what: str) -> ServiceError:
    return ServiceError("node_failed", f"node {node.id} {what}")
