"""HTTP protocol of the gateway's server. It has the limits of all ports of this service, and handles clients that are
not nodes."""

from __future__ import annotations

import secrets
from typing import Any

from cluster.errors import ServiceError
from cluster.http_protocol import READ_BYTES, BoundedHttp, Timer
from gateway.http.errors import native_body

WRITE_SECONDS = 60.0
"""Seconds after which a request ends if its full write buffer makes no progress, because the peer has stopped
reading."""
LAST_SECONDS = 2.0
"""Seconds for which a stopping server keeps an unused connection, because a request may be in transit."""
PROBE_SECONDS = (1.0, 1.0, 2.0)
"""Seconds before each probe of a peer that has stopped sending.

A peer whose socket is closed answers the first probe with a reset, so that the next probe fails.
"""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE = "probe"
"""Key in a request's state under which a response stores meaningless bytes. The server may send them to probe the peer
once the response has started."""
UNPARSABLE = "unparsable"
"""Name of the route under which metrics count input that is not an HTTP request."""


class GatewayHttp(BoundedHttp):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._write_timer, self._probe_timer = Timer(self.loop), Timer(self.loop)
        self._last = False

    def refusal(self, error: ServiceError) -> tuple[dict[str, str], Any]:
        """Returns the headers and body for a broken request, and counts it.

        The body has the native format, because the route is still unknown.
        """
        if "metrics" in self.app_state:
            self.app_state["metrics"].count_request(UNPARSABLE, error.status)
        request_id = f"req_{secrets.token_hex(12)}"
        return {"x-request-id": request_id}, native_body(error, request_id)

    def connection_lost(self, exc: Exception | None) -> None:
        self._write_timer.stop()
        self._probe_timer.stop()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._last:
            self._keep_alive = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handles the end of the peer's input by probing the peer. Returns True if the connection stays open.

        The peer may have closed, or may still read its response after shutdown(SHUT_WR). Only sending shows which; a
        closed peer is detected within seconds.
        """
        if self._receiving or self._lingering or self.cycle is None or self.cycle.response_complete:
            return False
        self.cycle.keep_alive = False
        self._probe_timer.start(PROBE_SECONDS[0], self._probe, PROBE_SECONDS[1:])
        return True

    def shutdown(self) -> None:
        """Stops the connection when the server stops. An unused connection stays open for LAST_SECONDS, because a
        request may be in transit."""
        if self.cycle is None and not self.transport.is_closing():
            self._last = True
            self.loop.call_later(LAST_SECONDS, self._end_unused)
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer.start(WRITE_SECONDS, self._end_unwritten, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._write_timer.stop()
        super().resume_writing()

    def _end_unwritten(self, before: int) -> None:
        """Ends the connection if its write buffer makes no progress. `before`: unwritten bytes at the last check."""
        unwritten = self.transport.get_write_buffer_size()
        if unwritten > before - READ_BYTES:
            self.transport.abort()
        else:
            self._write_timer.start(WRITE_SECONDS, self._end_unwritten, unwritten)

    def _probe(self, pauses: tuple[float, ...]) -> None:
        cycle = self._answered
        if cycle is None or self.transport.is_closing() or cycle.response_complete:
            return
        piece = cycle.scope["state"].get(PROBE)
        if cycle.scope["http_version"] != "1.1":
            pass  # HTTP/1.0 has neither interim responses nor chunks
        elif not cycle.response_started:
            self.transport.write(CONTINUE)
        elif piece and cycle.chunked_encoding:
            self.transport.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if pauses:
            self._probe_timer.start(pauses[0], self._probe, pauses[1:])

    def _end_unused(self) -> None:
        if self.cycle is None:
            super().shutdown()
