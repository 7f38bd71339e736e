"""A small HTTP proxy that comes between a client and an S3 server, and does what networks and servers do wrong."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit


@dataclass
class Fault:
    """What happens to the next requests whose "METHOD /path?query range" holds `match`.

    reset: dropped unread · refuse: `status` and `code`, not passed on · lose: passed on, and the reply dropped ·
    blind: passed on, and the reply replaced by `status` and `code` · stall: neither passed on nor answered ·
    cut: the reply's body ends `bytes_short` early · drip: the reply's body comes in bits, slowly, without an end ·
    whole: the request's Range header is lost · flip: a bit of the reply's body is another ·
    trickle: the body comes whole, in pieces
    """

    kind: str
    match: str = ""
    times: int = 1
    status: int = 500
    code: str = "InternalError"
    bytes_short: int = 1
    at: int = -1
    """Which byte of the body `flip` changes."""
    meanwhile: Callable[[], object] | None = None
    """Called once the server has answered, before the fault."""


@dataclass
class Proxy:
    """`with Proxy(upstream) as proxy:` listens at `proxy.url`."""

    upstream: str
    ignored: tuple[str, ...] = ()
    """Request headers, in lower case, that the server never sees."""
    unknown: tuple[str, ...] = ()
    """Beginnings of request headers, in lower case, with which a request is refused."""
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """"METHOD /path?query" of each, in the order of their arrival."""

    def __enter__(self) -> Proxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            line, headers = head[0], [entry for entry in head[1:] if entry]
            named = {name.lower(): value.strip() for name, _, value in (entry.partition(":") for entry in headers)}
            self.requests.append(line.rsplit(" ", 1)[0])
            fault = self._next_fault(f"{self.requests[-1]} {named.get('range', '')}")
            if fault.kind == "reset":
                return _reset(writer)
            if "expect" in named and fault.kind != "stall":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if fault.kind == "stall":
                await reader.read()  # until the client goes
                return None
            body = await reader.readexactly(int(named.get("content-length", 0)))
            if any(name.startswith(self.unknown) for name in named) and self.unknown:
                return writer.write(_error(Fault("refuse", status=501, code="NotImplemented")))
            if fault.kind == "refuse":
                return writer.write(_error(fault))
            dropped = {"connection", "expect", *self.ignored, *(["range"] if fault.kind == "whole" else [])}
            kept = [entry for entry in headers if entry.partition(":")[0].lower() not in dropped]
            reply = await self._ask("\r\n".join([line, *kept, "Connection: close", "", ""]).encode("latin-1") + body)
            if fault.meanwhile is not None:
                await asyncio.to_thread(fault.meanwhile)
            await _answer(writer, fault, reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went
        finally:
            writer.close()

    async def _ask(self, request: bytes) -> bytes:
        parts = urlsplit(self.upstream)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    def _next_fault(self, request: str) -> Fault:
        for fault in self.faults:
            if fault.match in request and fault.times > 0:
                fault.times -= 1
                return fault
        return Fault("none")


async def _answer(writer: asyncio.StreamWriter, fault: Fault, reply: bytes) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    if fault.kind == "lose":
        _reset(writer)
    elif fault.kind == "blind":
        writer.write(_error(fault))
    elif fault.kind == "cut":
        writer.write(head + b"\r\n\r\n" + body[: -fault.bytes_short])
    elif fault.kind == "flip":
        other = bytearray(body)
        other[fault.at] ^= 16
        writer.write(head + b"\r\n\r\n" + other)
    elif fault.kind == "trickle":
        writer.write(head + b"\r\n\r\n")
        for at in range(0, len(body), max(1, len(body) // 8)):
            writer.write(body[at : at + max(1, len(body) // 8)])
            await writer.drain()
            await asyncio.sleep(0.02)
    elif fault.kind == "drip":
        writer.write(head + b"\r\n\r\n")
        for at in range(len(body) - 1):
            writer.write(body[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.05)
    else:
        writer.write(reply)
        await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with a RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _error(fault: Fault) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>as asked</Message></Error>".encode()
    head = f"HTTP/1.1 {fault.status} Fault\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
