"""Server-sent events. Headers are sent with the first token, keep-alives during pauses, and errors as events of an open
stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache

import msgspec
from starlette.types import Receive, Scope, Send

from cluster.errors import ServiceError
from gateway.config import GatewayConfig
from gateway.http.connected import while_connected
from gateway.http.errors import is_unexpected, to_service_error
from gateway.http.protocol import PROBE

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
COMMENT = b": keep-alive\n\n"
BLANK_LINE = b"\n"
"""Keep-alive of streams: a blank line instead of a comment. `vllm bench serve` strips its input, so it would join a
comment to the next event and lose both."""

_encode = msgspec.json.Encoder().encode

log = logging.getLogger("gateway")


def sse(data: object, event: str | None = None) -> bytes:
    """Returns one event with JSON data."""
    return b"".join((_head(event), _encode(data), b"\n\n"))


@cache
def _head(event: str | None) -> bytes:
    """Returns the bytes that precede the data of an event with this name."""
    return b"event: " + event.encode() + b"\ndata: " if event else b"data: "


@dataclass
class EventStream:
    """ASGI response over `chunks`, each a complete event.

    Nothing is sent until the first chunk, or for `header_seconds`. An error that `chunks` raises by then is raised by
    this response and becomes a normal error status. A later error is sent as the last event, `failure(error, request
    id)`.
    """

    chunks: AsyncGenerator[bytes, None]
    headers: Callable[[], dict[str, str]]
    failure: Callable[[ServiceError, str], bytes]
    config: GatewayConfig
    keepalive: bytes = COMMENT

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][PROBE] = BLANK_LINE
        await while_connected(self._write(_Wire(send, self.headers), scope["state"]["request_id"]), receive)

    async def _write(self, wire: _Wire, request_id: str) -> None:
        async with aclosing(self.chunks) as chunks:
            beating = asyncio.ensure_future(self._beat(wire))
            last = b""
            try:
                async for chunk in chunks:
                    await wire.put(chunk)
            except asyncio.CancelledError:
                if wire.is_started:
                    stopping = ServiceError("unavailable", "the gateway is stopping", retry_after=1.0)
                    await wire.put(self.failure(stopping, request_id), more=False)
                raise
            except Exception as error:
                if not wire.is_started:
                    raise
                if is_unexpected(error):
                    log.error("an event stream failed", exc_info=error)
                last = self.failure(to_service_error(error), request_id)
            finally:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
            await wire.put(last, more=False)

    async def _beat(self, wire: _Wire) -> None:
        """Sends the headers if the first chunk is late. After that it sends keep-alives during pauses, until it is
        cancelled."""
        deadline = time.monotonic() + self.config.header_seconds
        while True:
            if wire.is_started:
                deadline = wire.last_sent_at + self.config.keepalive_seconds
            if (remaining_s := deadline - time.monotonic()) > 0:
                await asyncio.sleep(min(remaining_s, self.config.keepalive_seconds))
            elif wire.is_started:
                await wire.put(self.keepalive)
            else:
                await wire.begin()


class _Wire:
    """Sends the parts of one response. Chunks and keep-alives come from different tasks; headers are sent once, before
    both."""

    def __init__(self, send: Send, headers: Callable[[], dict[str, str]]) -> None:
        self._send = send
        self._headers = headers
        self._lock = asyncio.Lock()
        self.is_started = False
        self.last_sent_at = 0.0

    async def begin(self) -> None:
        async with self._lock:
            if not self.is_started:
                headers = [(name.encode(), value.encode()) for name, value in (HEADERS | self._headers()).items()]
                self.last_sent_at = time.monotonic()
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self.is_started = True

    async def put(self, chunk: bytes, more: bool = True) -> None:
        if not self.is_started:
            await self.begin()
        self.last_sent_at = time.monotonic()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
