"""uvicorn's HTTP parser with the bounds that it lacks: heads and trailers have a size, each wait for the peer an end.

Without them a caller without any key could fill the memory with one endless header, or hold connections open for ever.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cluster.errors import ServiceError
from gateway.errors import native_body

HEAD_BYTES = 64 << 10
"""Request line and headers; likewise trailers, and what stands between two chunks."""
HEAD_SECONDS = 30.0
"""From connecting, or from the first byte of a further request, to the end of its headers; and from an early answer to
the end of the body that it did not wait for."""
WRITE_SECONDS = 60.0
"""For which a full write buffer may stand still: then the peer has stopped reading, and its request ends."""
LAST_SECONDS = 2.0
"""That a connection without any request is kept when the server stops, for one that may be on its way."""
UNPARSABLE = "unparsable"
"""Stands for the route, in metrics, of what is no HTTP request."""

log = logging.getLogger("gateway.http")
log.setLevel(logging.ERROR)


class BoundedHttp(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # uvicorn warns of each broken request. Anyone may send those, and fill the disk: they are counted instead.
        self.logger = log
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._progress = False
        self._overhead = 0
        self._receiving = False
        self._last = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._progress = False
        super().data_received(data)
        self._overhead = 0 if self._progress else self._overhead + len(data)
        if self._overhead > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"the request's headers are larger than {HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._progress = True
        self._stop_timer()
        super().on_headers_complete()
        if self._last:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progress = True
        self._receiving = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._receiving:
            self._start_timer()
        super().on_response_complete()

    def shutdown(self) -> None:
        """The server stops. A request may be on its way on a connection that was just made: it is answered."""
        if self.cycle is None and not self.transport.is_closing():
            self._last = True
            self.loop.call_later(LAST_SECONDS, self._end_unused)
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # close() would wait for a peer that does not read the end of its answer

    def send_400_response(self, msg: str) -> None:
        """In the contract's shape; there is no route yet that could have another one.

        Inside an answer that has begun it would be taken for its content, so then the connection only ends.
        """
        if "services" in self.app_state:
            self.app_state["services"].metrics.count_request(UNPARSABLE, 400)
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        request_id = f"req_{secrets.token_hex(12)}"
        body = msgspec.json.encode(native_body(ServiceError("invalid_request", msg), request_id))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _end_unused(self) -> None:
        if self.cycle is None:
            self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # an earlier request on this connection is still being answered
        else:
            self.transport.abort()
