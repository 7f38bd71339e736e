"""uvicorn's HTTP parser with additional limits, for every port that Garnish serves.

The size of request heads and trailers is limited, and so is the time to receive a head. A caller that is answered
before its request is complete can still read the answer. Without these limits a caller without any key could fill the
memory with one endless header, or hold connections open for ever. The sender of a large body would find its connection
reset, and could not read why it was refused. When file descriptors run short, connections that are idle or have not
shown a key are closed first.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import cache
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cluster.descriptors import Descriptors, current_limit
from cluster.errors import ServiceError
from cluster.idle_connections import Use, make_room

HEAD_BYTES = 64 << 10
"""Maximum size of request line and headers, in bytes. The same limit applies to trailers, and to the data between two
chunks."""
HEAD_LINES = 1000
"""Maximum number of headers in a request. Even a short header takes far more memory than its bytes."""
HEAD_SECONDS = 30.0
"""Maximum seconds to the end of a request's headers. They count from the start of the connection, and for further
requests from their first byte."""
MAX_WAITING = 16
"""Maximum number of pipelined requests that wait on one connection for an earlier answer. A peer that sends more is
disconnected."""
READ_BYTES = 64 << 10
"""Minimum number of bytes that a peer has to read between two checks, as long as that many remain."""
LINGER_BYTES = 1 << 30
"""Maximum number of bytes of a refused body that are read and dropped after the answer, if the request has shown a
valid key. Unread bytes would reset the connection, often before the sender has read the answer. This is twice the
largest body accepted by default."""
KEYLESS_LINGER_BYTES = 1 << 20
"""Same limit as LINGER_BYTES, for requests without a valid key, and for data that is not a valid request."""
LINGER_SECONDS, LINGER_IDLE_SECONDS = 60.0, 5.0
"""Maximum seconds of lingering (reading and dropping data): in total, and without a received byte."""
KEYLESS_SECONDS = 5.0
"""Seconds for which a request without a valid key is not disconnected while descriptors are scarce. Checking a key may
take that long."""
RETRY_AFTER = 1.0
"""Retry-After, in seconds, of a request that is refused because no descriptors are left."""
KEYED = "keyed"
"""Key in a request's state that is set once the request has shown a valid key, or the cluster secret."""

log = logging.getLogger("cluster.http")
log.setLevel(logging.ERROR)


class _LingeringTransport:
    """Transport whose `close` first calls `linger`. If that returns True, it closes the connection later itself."""

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


class Timer:
    """Timer that calls back once, unless it is stopped or restarted before."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Calls `callback` with `args` after `seconds`. An earlier call that is still pending is cancelled."""
        self.stop()
        self._handle = self._loop.call_later(seconds, callback, *args)

    def stop(self) -> None:
        """Cancels the pending call, if there is one."""
        if self._handle is not None:
            self._handle.cancel()


def mark_keyed(scope: Scope) -> None:
    """Records that the request has shown a valid key, or the cluster secret."""
    scope.setdefault("state", {})[KEYED] = True


@cache
def descriptors() -> Descriptors:
    """Returns this process's count of descriptors, with the limit at the first call."""
    return Descriptors(current_limit())


def _answer_as_http_1_0(cycle: RequestResponseCycle) -> None:
    """Prepares the answer for a client of HTTP/1.0, which knows neither chunks nor interim answers: a body whose length
    is not stated ends with the connection."""
    send, is_open_ended = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if is_open_ended else None
        elif is_open_ended:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.waiting_for_100_continue = False
    cycle.send = send_unchunked  # type: ignore[method-assign]


class _Refused(Exception):
    """Aborts the parsing of a request. `send_400_response` then sends the answer."""


class BoundedHttp(HttpToolsProtocol):
    """HTTP protocol of one connection, with limits on heads, pipelining and idle time.

    An answer that is sent before the complete body has arrived is the last one on its connection. The connection then
    lingers: the rest of the body is read and dropped. A request's offer to switch protocols (`Upgrade`) is ignored, and
    its body is read as usual.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn logs a warning for each malformed request, so any client could fill the disk.
        self.logger = log
        self._timer = Timer(self.loop)
        """Timer for the end of a head, or of lingering."""
        self._progress = False
        self._overhead = 0
        """Bytes received since the last complete head or body data."""
        self._head_bytes = self._head_lines = 0
        """Bytes and lines received of the current head or trailers."""
        self._receiving = self._in_head = False
        self._answered: RequestResponseCycle | None = None
        """Request that is being answered, or was answered last; `cycle` is the newest request."""
        self._keep_alive = False
        """True: the connection is kept open after this request, if the complete request arrives before its answer."""
        self._lingering = False
        self._dropped, self._drop_limit = 0, KEYLESS_LINGER_BYTES
        self._is_refused = False
        """True: the latest request was refused, for any reason."""
        self._is_excess = False
        """True: the latest request must be refused because too few descriptors are free."""
        self.began = self.loop.time()
        """Time at which the connection, or its latest request, began, in seconds of the event loop."""

    def refusal(self, error: ServiceError) -> tuple[dict[str, str], Any]:
        """Returns the headers and the JSON body of the answer to data that is not a valid request."""
        return {}, {"error": {"type": error.type, "message": error.message}}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = _LingeringTransport(transport, self._linger)  # type: ignore[assignment]
        self._timer.start(HEAD_SECONDS, self._expire)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.stop()
        self._receiving = False
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._dropped += len(data)
            if self._dropped > self._drop_limit:
                self.transport.abort()
            return
        self._progress = False
        self._unset_keepalive_if_required()
        self._parse(data)
        self._overhead = 0 if self._progress else self._overhead + len(data)
        if self._overhead > HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = self._in_head = True
        self._head_bytes = self._head_lines = 0
        self._timer.start(HEAD_SECONDS, self._expire)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_lines += 1
        self._count_head(len(name) + len(value) + 4)
        if self._in_head:  # a trailer is not a header: it came after the headers were checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._upgrades():
            return
        if len(self.pipeline) >= MAX_WAITING:
            raise _Refused("too many requests wait for an answer")
        self.began = self.loop.time()
        self._is_excess = not self._make_room()
        if self._is_excess:
            raise _Refused("no descriptors are left")
        self._progress = True
        self._head_bytes = self._head_lines = 0
        self._timer.stop()
        super().on_headers_complete()
        if self.scope["http_version"] != "1.1":
            _answer_as_http_1_0(self.cycle)
        self._in_head = False
        if not self.pipeline:
            self._answered = self.cycle
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades():
            return
        self._progress = True
        self._receiving = False
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def use(self, now: float) -> Use:
        """Returns the connection's use at the time `now` of the event loop."""
        if self._lingering:
            return Use.LINGERING
        answered = self.cycle is None or self.cycle.response_complete
        is_busy = not answered or self.transport.get_write_buffer_size() > 0
        if self._is_keyed():
            return Use.BUSY if is_busy else Use.IDLE
        return Use.BUSY if is_busy and now - self.began < KEYLESS_SECONDS else Use.KEYLESS

    def drop(self) -> None:
        """Closes the connection at once, with a reset if the peer still sends."""
        self.transport.abort()

    def shutdown(self) -> None:
        self._keep_alive = False
        if self.cycle is None or self.cycle.response_complete:
            self._receiving = False  # a further request will get no answer
        super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self._end_unread(math.inf)

    def _end_unread(self, before: float) -> None:
        """Closes the connection once the peer has read the last answer, or has stopped reading it. `before` is the
        number of unread bytes at the last check."""
        unread = self.transport.get_write_buffer_size()
        if self.transport.is_closing() or unread == 0 or unread > before - READ_BYTES:
            self.transport.abort()  # close() would wait for a peer that does not read its answer
        else:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self._end_unread, unread)

    def _is_keyed(self) -> bool:
        """Returns whether the request that is being answered, or was answered last, has shown a valid key."""
        return self._answered is not None and KEYED in self._answered.scope["state"]

    def _make_room(self) -> bool:
        """Closes other connections if descriptors run short. Returns False if this connection's request has to be
        refused."""
        connections: set[BoundedHttp] = self.connections  # type: ignore[assignment]
        return make_room(descriptors(), connections, self, self.loop.time())

    def _upgrades(self) -> bool:
        """Returns whether the parser treats the data after the head as another protocol."""
        return bool(self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT")

    def _parse(self, data: bytes) -> None:
        try:
            while data:
                data = self._parse_until_upgrade(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _parse_until_upgrade(self, data: bytes) -> bytes:
        """Returns the data to parse next: a request that offers another protocol, rewritten without that offer. Without
        this the parser would skip the body, which would then be parsed as a request."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if not self._upgrades():
                raise httptools.HttpParserError("CONNECT") from None
            start = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
            lines = [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            return b"\r\n".join([start, *lines, b"", data[offer.args[0] :]])
        return b""

    def send_400_response(self, msg: str) -> None:
        if self._is_excess:
            why = "the server has no room for more connections now"
            self._refuse(ServiceError("unavailable", why, retry_after=RETRY_AFTER))
        elif self._is_too_large():
            self._refuse_head()
        else:
            self._refuse(ServiceError("invalid_request", msg))

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._is_too_large():
            raise _Refused("too large a head")

    def _is_too_large(self) -> bool:
        return self._head_bytes > HEAD_BYTES or self._head_lines > HEAD_LINES

    def _refuse_head(self) -> None:
        why = f"the request's headers are more than {HEAD_LINES}, or larger than {HEAD_BYTES} bytes"
        self._refuse(ServiceError("head_too_large", why))

    def _refuse(self, error: ServiceError) -> None:
        """Answers with the error and closes the connection. Sends no answer while another request is still being
        answered: it would be taken for that request's answer, or for a part of it."""
        cycle = self._answered
        broken = self._receiving and not self._in_head and cycle is self.cycle  # the error is in the body of `cycle`
        self._receiving = self._is_refused = True
        headers, body = self.refusal(error)
        if cycle is None or cycle.response_complete or (broken and not cycle.response_started):
            content = msgspec.json.encode(body)
            fixed = {"content-type": "application/json", "connection": "close", "content-length": str(len(content))}
            if error.retry_seconds is not None:
                fixed["retry-after"] = str(error.retry_seconds)
            lines = "".join(f"{name}: {value}\r\n" for name, value in (fixed | headers).items())
            status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
            self.transport.write(f"{status}{lines}\r\n".encode() + content)
        self.transport.close()

    def _linger(self) -> bool:
        """Starts lingering, after the server has written its last data.

        Returns False when there is nothing left to read because the request is complete. Also returns False when the
        connection already lingers or is closing. Otherwise ends the sending side at once. The connection is reset only
        when the peer sends for too long.
        """
        if not self._receiving or self._lingering or self.transport.is_closing():
            return False
        self._lingering = True
        self._drop_limit = LINGER_BYTES if self._is_keyed() and not self._is_refused else KEYLESS_LINGER_BYTES
        self._timer.stop()
        self._disconnect()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._timer.start(LINGER_IDLE_SECONDS, self._end_lingering, LINGER_IDLE_SECONDS, 0)
        return True

    def _disconnect(self) -> None:
        """Marks the peer as disconnected for every response in progress. The server itself does this only for the
        newest request."""
        for cycle in (self._answered, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _end_lingering(self, seconds: float, dropped: int) -> None:
        """Resets the connection when the peer is silent or has sent for too long; otherwise checks again later.
        `seconds` is how long the connection has lingered; `dropped` is the number of dropped bytes at the last
        check."""
        if self._dropped == dropped or seconds >= LINGER_SECONDS:
            self.transport.abort()
            return
        self._timer.start(LINGER_IDLE_SECONDS, self._end_lingering, seconds + LINGER_IDLE_SECONDS, self._dropped)

    def _expire(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # An earlier request on this connection is still being answered.
            self._timer.start(HEAD_SECONDS, self._expire)
        else:
            self.transport.abort()
