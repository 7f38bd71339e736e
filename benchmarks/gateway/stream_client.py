"""Streams read with as little work as a client can do: it shares its cores with what it measures.

httptools reads the answers where they arrive, and a token's time is noted there; no task wakes before a stream's end.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

import httptools
import msgspec

from benchmarks.common.latency import Sample

CALL_SECONDS = 120.0
IDLE_BASE = 60.0
"""Added to the idle time in a call's `timeout`, by which the stub knows it."""


class _Token(msgspec.Struct, frozen=True):
    text: str


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int


class _Done(msgspec.Struct, frozen=True):
    usage: _Usage


_token = msgspec.json.Decoder(_Token)
_done = msgspec.json.Decoder(_Done)


class Streams:
    """Calls the function `name` of a server at `url`, over connections that are kept; `close` ends them."""

    def __init__(self, url: str, name: str, key: str) -> None:
        place = urlsplit(url)
        assert place.hostname is not None and place.port is not None
        self._place, self.name = (place.hostname, place.port), name
        self._head = (
            f"POST /invoke/{name} HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {key}\r\n"
            "content-type: application/json\r\ncontent-length: "
        ).encode()
        self._idle: list[_Connection] = []
        self.delays: list[float] = []
        """Seconds from each token's sending to its receipt."""

    async def call(self, tokens: int, idle: float = 0.0) -> Sample:
        body = msgspec.json.encode(
            {"prompt": "Once", "max_tokens": tokens, "stream": True, "timeout": IDLE_BASE + idle, "ignore_eos": True}
        )
        sample = Sample(self.name, sent=time.monotonic())
        try:
            async with asyncio.timeout(CALL_SECONDS):
                connection = self._idle.pop() if self._idle else await self._connect()
                await connection.ask(self._head + b"%d\r\n\r\n" % len(body) + body, sample)
            if connection.keeps:
                self._idle.append(connection)
        except TimeoutError:
            sample.error = "timeout"
        except OSError as error:
            sample.error = f"connection: {type(error).__name__}"
        sample.end = time.monotonic()
        return sample

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self.delays), *self._place)
        return connection


class _Connection(asyncio.Protocol):
    """A connection with one request after another; httptools calls the methods that begin with `on_`."""

    def __init__(self, delays: list[float]) -> None:
        self._delays = delays
        self._sample = Sample("")
        self._ended: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now, self._rest, self._done = 0.0, b"", False
        self.keeps = False

    async def ask(self, request: bytes, sample: Sample) -> None:
        """Fills the sample, its error too. Raises OSError when the connection is gone."""
        self._sample, self._rest, self._done, self.keeps = sample, b"", False, False
        self._ended = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            raise ConnectionError("closed between two requests")
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._ended = None
            if not self.keeps:
                self._transport.abort()

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._end("cut off")

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError):  # no HTTP, or events that are not what they should be
            self._end("malformed")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"event: token\ndata: "):
                self._sample.times.append(self._now)
                self._delays.append(self._now - float(_token.decode(event[19:]).text))
            elif event.startswith(b"event: done\ndata: "):
                self._sample.output_tokens = _done.decode(event[18:]).usage.completion_tokens
                self._done = True
            elif not event.startswith(b":"):
                self._sample.error = "error event"

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self.keeps = self._parser.should_keep_alive()
        if status != 200:
            self._end(str(status))
        else:
            self._end(self._sample.error or ("" if self._done else "cut off"))

    def _end(self, error: str) -> None:
        if self._ended is not None and not self._ended.done():
            self._sample.error = error
            self._ended.set_result(None)
