"""A node without a model, as a process: it streams tokens at a set rate, so that what is measured is what is before it.

It speaks the nodes' protocol (POST /generate), and answers POST /invoke/{name} with the very events that the gateway
would send: a client calls it directly as it calls the gateway. Each token's text is the time at which it was sent. It
shares its cores with what is measured, so it does no more than it must: a timer and a write for each token.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import httptools
import msgspec
import uvloop

from cluster.messages import ColdStart, Done, GenerateRequest, Started, Timing, Token, encode_event
from cluster.news import NodeRecord, full_report
from cluster.received import Received
from cluster.secret import authorization

PUBLISH_SECONDS = 0.2
TIMING = Timing(queue=0.0, prefill=0.0, total=0.0, cold_start=ColdStart("none", "none", 0.0, 0.0))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class StubConfig(msgspec.Struct, frozen=True):
    gateway: str
    secret: str
    base: str
    base_id: str
    gap: float
    """Seconds between two tokens."""
    prefill: float


class _Invocation(msgspec.Struct, frozen=True):
    """Fields of a client's call."""

    max_tokens: int
    timeout: float


class _Event(msgspec.Struct, frozen=True):
    text: str
    index: int
    token_id: int


@dataclass
class _Stream:
    """An answer that is being sent."""

    token: Callable[[int, str], bytes]
    end: bytes
    count: int
    begin: float
    """time of the first token by the event loop's clock"""
    gap: float
    index: int = 0


class Stub:
    def __init__(self, config: StubConfig, url: str) -> None:
        self.config, self.url = config, url
        self._received = Received()
        self._seq = 0

    def answer(self, path: bytes, body: bytes, now: float) -> tuple[bytes, _Stream]:
        """Returns what is sent at once, and the stream of the rest."""
        if path == b"/generate":
            request = msgspec.msgpack.decode(body, type=GenerateRequest)
            self._received = self._received.with_one(request.place)
            head = HEAD % b"application/octet-stream" + _chunk(encode_event(Started(node="stub", cold_start="none")))
            end = encode_event(Done("length", 1, request.max_tokens, 0, TIMING))
            return head, self._stream(_frame, end, request.max_tokens, request.timeout, now)
        called = msgspec.json.decode(body, type=_Invocation)
        end = b'event: done\ndata: {"usage":{"completion_tokens":%d}}\n\n' % called.max_tokens
        return HEAD % b"text/event-stream", self._stream(_sse, end, called.max_tokens, called.timeout, now)

    def _stream(
        self, token: Callable[[int, str], bytes], end: bytes, count: int, timeout: float, now: float
    ) -> _Stream:
        # A call with a timeout of over a minute is one that idles: its second token comes much later.
        gap = timeout - 60.0 if timeout > 60.5 else self.config.gap
        return _Stream(token, end, count, now + self.config.prefill, gap)

    async def publish(self) -> None:
        """Publishes records until cancelled. The gateway may not be there yet."""
        headers = {**authorization(self.config.secret), "content-type": "application/msgpack"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await session.post(
                        self.config.gateway + "/cluster/record",
                        data=msgspec.msgpack.encode(full_report(self._record())),
                    )
                await asyncio.sleep(PUBLISH_SECONDS)

    def _record(self) -> NodeRecord:
        self._seq += 1
        return NodeRecord(
            id="stub", epoch="1", seq=self._seq, url=self.url, state="ready", base=self.config.base,
            base_id=self.config.base_id, max_context=512, running=0, queued=0, queue_limit=100_000,
            kv_blocks_free=1000, kv_blocks=1000, block_tokens=16, received=self._received,
        )  # fmt: skip


class _Connection(asyncio.Protocol):
    """A connection with one request after another; httptools calls the methods that begin with `on_`."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", b""
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        head, stream = self._stub.answer(self._path, self._body, self._loop.time())
        self._transport.write(head)
        self._timer = self._loop.call_at(stream.begin, self._send, stream)

    def _send(self, stream: _Stream) -> None:
        chunk = _chunk(stream.token(stream.index, repr(time.monotonic())))
        stream.index += 1
        if stream.index < stream.count:
            self._transport.write(chunk)
            self._timer = self._loop.call_at(stream.begin + stream.index * stream.gap, self._send, stream)
        else:
            self._transport.write(chunk + _chunk(stream.end) + END)


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _frame(index: int, text: str) -> bytes:
    return encode_event(Token(text=text, token_ids=[index], index=index))


def _sse(index: int, text: str) -> bytes:
    return b"event: token\ndata: " + msgspec.json.encode(_Event(text, index, index)) + b"\n\n"


async def serve(config: StubConfig) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    stub = Stub(config, f"http://127.0.0.1:{listener.getsockname()[1]}")
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(stub), sock=listener)
    print(stub.url, flush=True)
    async with server:
        await stub.publish()


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=StubConfig)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))


if __name__ == "__main__":
    main()
