"""Server-sent events: headers with the first token, comments while nothing comes, errors inside an open stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from cluster.errors import ServiceError
from gateway.connected import while_connected
from gateway.errors import is_unexpected, to_service_error

KEEPALIVE = b": keep-alive\n\n"

log = logging.getLogger("gateway")


def sse(data: object, event: str | None = None) -> bytes:
    """One event with JSON data."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream:
    """An ASGI response over `chunks`, each a whole event.

    Until the first chunk, or for `header_seconds`, nothing is sent: an error that `chunks` raises by then leaves this
    response as an exception, and becomes a proper status. Later ones are sent as `failure(error)`, the last event.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        headers: Callable[[], dict[str, str]],
        failure: Callable[[ServiceError], bytes],
        *,
        header_seconds: float,
        keepalive_seconds: float,
    ) -> None:
        self._chunks = chunks
        self._headers = headers
        self._failure = failure
        self._header_seconds = header_seconds
        self._keepalive_seconds = keepalive_seconds

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._write(send), receive)

    async def _write(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            pending = asyncio.ensure_future(_next(chunks))
            try:
                await asyncio.wait({pending}, timeout=self._header_seconds)
                if pending.done():
                    pending.result()  # raises what came instead of a first token
                await send({"type": "http.response.start", "status": 200, "headers": self._start()})
                last = b""
                try:
                    while True:
                        await asyncio.wait({pending}, timeout=self._keepalive_seconds)
                        if not pending.done():
                            await _send(send, KEEPALIVE)
                            continue
                        chunk = pending.result()
                        if chunk is None:
                            break
                        pending = asyncio.ensure_future(_next(chunks))
                        await _send(send, chunk)
                except asyncio.CancelledError:
                    stopping = ServiceError("unavailable", "the gateway is stopping", retry_after=1.0)
                    await send({"type": "http.response.body", "body": self._failure(stopping)})
                    raise
                except Exception as error:
                    if is_unexpected(error):
                        log.error("stream failed", exc_info=error)
                    last = self._failure(to_service_error(error))
                await send({"type": "http.response.body", "body": last})
            finally:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)

    def _start(self) -> list[tuple[bytes, bytes]]:
        fixed = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            "x-accel-buffering": "no",
        }
        return [(name.encode(), value.encode()) for name, value in (fixed | self._headers()).items()]


async def _send(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _next(chunks: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(chunks, None)
