"""uvicorn's HTTP parser with the bounds that it lacks, on every port of ours: heads and trailers have a size, waiting
for the rest of a head ends, and whoever is answered before its request is complete can read the answer.

Without them a caller without any key or secret could fill the memory with one endless header, or hold connections open
for ever; and a sender of a large body would find its connection reset instead of reading why it was refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.errors import ServiceError

HEAD_BYTES = 64 << 10
"""Request line and headers; likewise trailers, and what stands between two chunks."""
HEAD_SECONDS = 30.0
"""From connecting, or from the first byte of a further request, to the end of its headers."""
LINGER_BYTES = 1 << 30
"""Of a refused body, read and dropped after the answer: what is left unread resets the connection, often before its
sender has read the answer. Twice the largest body that is taken by default."""
LINGER_HEAD_BYTES = 1 << 20
"""The same of what is no request, or has too large a head."""
LINGER_SECONDS, LINGER_IDLE_SECONDS = 60.0, 5.0
"""For which that lasts at most in all, and without any byte."""

log = logging.getLogger("cluster.http")
log.setLevel(logging.ERROR)


class _LingeringTransport:
    """A transport whose closing `linger` may take over: if it returns True, it ends the connection by itself later."""

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], bool]) -> None:
        self._transport, self._linger = transport, linger
        self._closed = False

    def write(self, data: bytes) -> None:
        if not self._closed:
            self._transport.write(data)

    def close(self) -> None:
        if self._closed or not self._linger():
            self._transport.close()
        self._closed = True

    def is_closing(self) -> bool:
        return self._closed or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _TooLargeHead(Exception):
    """Ends the parsing; the answer is made where that is noticed."""


class BoundedHttp(HttpToolsProtocol):
    """An answer that does not wait for the whole body is the last one on its connection, which lingers after it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn warns of each broken request. Anyone may send those, and fill the disk.
        self.logger = log
        self._timer: asyncio.TimerHandle | None = None
        self._progress = False
        self._overhead = 0
        """Bytes since a head was complete or content came."""
        self._head_bytes = 0
        """Of the lines of this head (or these trailers) so far."""
        self._receiving = False
        self._keep_alive = False
        """Whether the connection is kept after this request, if all of it comes before its answer."""
        self._lingering = False
        self._dropped, self._drop_limit = 0, LINGER_BYTES

    def refusal(self, error: ServiceError) -> tuple[dict[str, str], Any]:
        """Headers and JSON body of the answer to what is no request."""
        return {}, {"error": {"type": error.type, "message": error.message}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _LingeringTransport(transport, self._linger)  # type: ignore[assignment]
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._receiving = False
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._dropped += len(data)
            if self._dropped > self._drop_limit:
                self.transport.abort()
            return
        self._progress = False
        super().data_received(data)
        self._overhead = 0 if self._progress else self._overhead + len(data)
        if self._overhead > HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = True
        self._head_bytes = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._progress = True
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        self._receiving = False
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()

    def shutdown(self) -> None:
        self._keep_alive = False
        if self.cycle is None or self.cycle.response_complete:
            self._receiving = False  # of a further request: there will be no answer to read
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # close() would wait for a peer that does not read the end of its answer

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > HEAD_BYTES:
            self._refuse_head()
        else:
            self._refuse(ServiceError("invalid_request", msg))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            raise _TooLargeHead

    def _refuse_head(self) -> None:
        self._refuse(ServiceError("head_too_large", f"the request's headers are larger than {HEAD_BYTES} bytes"))

    def _refuse(self, error: ServiceError) -> None:
        """Inside an answer that has begun another one would be taken for its content: then the connection only ends."""
        self._receiving, self._drop_limit = True, LINGER_HEAD_BYTES
        headers, body = self.refusal(error)
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            content = msgspec.json.encode(body)
            fixed = {"content-type": "application/json", "connection": "close", "content-length": str(len(content))}
            lines = "".join(f"{name}: {value}\r\n" for name, value in (fixed | headers).items())
            status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            self.transport.write(f"{status}{lines}\r\n".encode() + content)
        self.transport.close()

    def _linger(self) -> bool:
        """The server has said all it will. Returns False when the whole request is there: nothing is left to read.

        Else the peer is told the end of the answer at once, and reset only when it goes on sending for too long.
        """
        if not self._receiving or self._lingering or self.transport.is_closing():
            return False
        self._lingering = True
        self._stop_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(LINGER_IDLE_SECONDS, self._end_lingering, LINGER_IDLE_SECONDS, 0)
        return True

    def _end_lingering(self, seconds: float, dropped: int) -> None:
        """After so many seconds, `dropped` bytes having been dropped at the last look."""
        if self._dropped == dropped or seconds >= LINGER_SECONDS:
            self.transport.abort()
            return
        later = seconds + LINGER_IDLE_SECONDS
        self._timer = self.loop.call_later(LINGER_IDLE_SECONDS, self._end_lingering, later, self._dropped)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # an earlier request on this connection is still being answered
        else:
            self.transport.abort()
