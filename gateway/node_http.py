"""Requests to nodes whose answers are streams: over connections that are kept, each answer read where it arrives.

httptools parses, as in the server. What a general HTTP client does for each request and each piece of an answer lies in
every first token's way (docs/scheduling.md).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from urllib.parse import SplitResult, urlsplit

import httptools
from aiohappyeyeballs import start_connection

KEEP_SECONDS = 30.0
"""Less than nodes keep a connection that is not used."""
HEAD_BYTES = 64 << 10
"""Of an answer, until its headers have ended."""
BUFFER_BYTES = 128 << 10
"""That may wait to be read; then the node waits, too."""
NEXT_ADDRESS_SECONDS = 0.25
"""After which a name's next address is tried as well (RFC 8305)."""


class NodeConnections:
    """`headers`: of each request. `connect`: seconds that a connection may take to be made."""

    def __init__(self, headers: dict[str, str], *, connect: float) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._connect = connect
        self._idle: dict[str, list[NodeResponse]] = {}
        self._tls: ssl.SSLContext | None = None

    async def post(self, url: str, path: str, body: bytes) -> NodeResponse:
        """The answer, once its headers are there. Raises OSError, TimeoutError among them."""
        try:
            request = self._head(url, path, len(body)) + body
            connection = self._kept(url) or await self._open(url)
        except UnicodeError as error:  # a name that the DNS can't have
            raise ConnectionError(f"{url} is no address: {error}") from error
        try:
            await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """The connections that are not used. Those in use are closed by their users."""
        for connection in [each for idle in self._idle.values() for each in idle]:
            connection.abort()

    def keep(self, connection: NodeResponse) -> None:
        """It may be used again."""
        self._idle.setdefault(connection.url, []).append(connection)

    def forget(self, connection: NodeResponse) -> None:
        idle = self._idle[connection.url]
        idle.remove(connection)
        if not idle:
            del self._idle[connection.url]

    def _kept(self, url: str) -> NodeResponse | None:
        while url in self._idle:
            connection = self._idle[url][-1]
            if connection.is_open:
                return connection
            connection.abort()  # it is kept no longer
        return None

    def _head(self, url: str, path: str, size: int) -> bytes:
        parts = urlsplit(url)
        lines = f"POST {parts.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {parts.netloc}\r\n{self._headers}"
        return f"{lines}content-length: {size}\r\n\r\n".encode("latin-1")

    async def _open(self, url: str) -> NodeResponse:
        parts = urlsplit(url)
        tls = self._context() if parts.scheme == "https" else None
        host = parts.hostname or ""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect):
            addresses = await loop.getaddrinfo(host, _port(parts), type=socket.SOCK_STREAM)
            opened = await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS)
            try:
                _, connection = await loop.create_connection(
                    lambda: NodeResponse(self, url), sock=opened, ssl=tls, server_hostname=host if tls else None
                )
            except BaseException:
                opened.close()
                raise
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


class NodeResponse(asyncio.Protocol):
    """One answer after another on one connection, which `owner` keeps when an answer was read to its end.

    httptools calls the methods that begin with `on_`.
    """

    def __init__(self, owner: NodeConnections, url: str) -> None:
        self._owner, self.url = owner, url
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.TimerHandle | None = None
        """While it is kept."""
        self._waiter: asyncio.Future[None] | None = None
        self._lost: OSError | None = None
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        """0 until the headers are there."""
        self._head_bytes = 0
        self._waiting = bytearray()
        self._paused = self._complete = self._keeps = False
        self._failure: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self._lost is None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> None:
        """Returns when the answer's headers are there. Raises OSError."""
        self._forget()
        self._begin()
        if not self.is_open:
            raise self._lost or ConnectionError("the connection is closed")
        self._transport.write(request)
        while not self.status:
            await self._more()

    async def read(self) -> bytes:
        """What has come since; empty at the end. Raises OSError when the connection breaks, or what `fail` was
        given."""
        while self._failure is None and not self._waiting and not self._complete:
            await self._more()
        if self._failure is not None:
            raise self._failure
        data = bytes(self._waiting)
        self._waiting.clear()
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
        return data

    def fail(self, error: Exception) -> None:
        """Whoever reads gets it, now or with the next read."""
        self._failure = error
        self._wake()

    def close(self) -> None:
        """The answer is of no use any more. The connection is kept when the answer was read to its end, and the node
        has the whole of its request: it may have answered before."""
        if self._expiry is not None:
            return
        is_read = self._complete and not self._waiting
        if is_read and self._keeps and self.is_open and not self._transport.get_write_buffer_size():
            self._expiry = self._loop.call_later(KEEP_SECONDS, self.abort)
            self._owner.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self._transport.abort()
        self._forget()

    async def _more(self) -> None:
        """Returns when something has come. Raises OSError when nothing will."""
        if self._lost is not None:
            raise self._lost
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break(self, error: OSError) -> None:
        self._lost = self._lost or error
        self._transport.abort()
        self._wake()

    def _forget(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
            self._owner.forget(self)

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = self._lost or ConnectionError(str(error or "the node closed the connection"))
        self._forget()
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._complete:
            self._break(ConnectionError("more came than an answer"))
            return
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(ConnectionError(f"what came is no HTTP ({error})"))
            return
        if not self.status and self._head_bytes > HEAD_BYTES:
            self._break(ConnectionError(f"the answer's headers are larger than {HEAD_BYTES} bytes"))
        elif len(self._waiting) > BUFFER_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    # --- httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise ConnectionError("more came than an answer")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # those before tell of an answer that is still to come
            self.status = status

    def on_body(self, body: bytes) -> None:
        self._waiting += body

    def on_message_complete(self) -> None:
        self._complete = bool(self.status)
        self._keeps = self._parser.should_keep_alive()
