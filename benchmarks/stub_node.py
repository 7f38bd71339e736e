"""A node without a model, as a process: it streams tokens at a set rate, so that what is measured is what is before it.

It speaks the nodes' protocol (POST /generate), and answers POST /invoke/{name} with the very events that the gateway
would send: a client calls it directly as it calls the gateway. Each token's text is the time at which it was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from cluster.messages import ColdStart, Done, GenerateRequest, NodeRecord, Started, Timing, Token, encode_event
from cluster.secret import authorization

PUBLISH_SECONDS = 0.2
KEEP_ALIVE = 90
"""Seconds that an idle connection stays open, as with real nodes."""
TIMING = Timing(queue=0.0, prefill=0.0, total=0.0, cold_start=ColdStart("none", "none", 0.0, 0.0))


class StubConfig(msgspec.Struct, frozen=True):
    gateway: str
    secret: str
    base: str
    base_id: str
    gap: float
    """Seconds between two tokens."""
    prefill: float
    """Seconds before the first one."""


class Stub:
    def __init__(self, config: StubConfig, url: str) -> None:
        self.config, self.url = config, url
        self._acknowledged: list[str] = []
        self._seq = 0

    async def generate(self, request: Request) -> Response:
        asked = msgspec.msgpack.decode(await request.body(), type=GenerateRequest)
        self._acknowledged.append(asked.id)
        return StreamingResponse(self._frames(asked.max_tokens, _gap(asked.timeout, self.config.gap)))

    async def invoke(self, request: Request) -> Response:
        asked = msgspec.json.decode(await request.body())
        events = self._events(asked["max_tokens"], _gap(asked["timeout"], self.config.gap))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _frames(self, count: int, gap: float) -> AsyncIterator[bytes]:
        yield encode_event(Started(node="stub", cold_start="none"))
        async for index, text in self._tokens(count, gap):
            yield encode_event(Token(text=text, token_ids=[index], index=index))
        yield encode_event(Done("length", 1, count, 0, TIMING))

    async def _events(self, count: int, gap: float) -> AsyncIterator[bytes]:
        async for index, text in self._tokens(count, gap):
            yield (
                b"event: token\ndata: "
                + msgspec.json.encode({"text": text, "index": index, "token_id": index})
                + b"\n\n"
            )
        yield b'event: done\ndata: {"usage":{"completion_tokens":%d}}\n\n' % count

    async def _tokens(self, count: int, gap: float) -> AsyncIterator[tuple[int, str]]:
        begin = time.monotonic() + self.config.prefill
        for index in range(count):
            await asyncio.sleep(begin + index * gap - time.monotonic())
            yield index, repr(time.monotonic())

    async def publish(self) -> None:
        """Until cancelled. The gateway may not be there yet."""
        headers = {**authorization(self.config.secret), "content-type": "application/msgpack"}
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                told, self._acknowledged = self._acknowledged, []
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await session.post(
                        self.config.gateway + "/cluster/record", data=msgspec.msgpack.encode(self._record(told))
                    )
                await asyncio.sleep(PUBLISH_SECONDS)

    def _record(self, acknowledged: list[str]) -> NodeRecord:
        self._seq += 1
        return NodeRecord(
            id="stub", epoch="1", seq=self._seq, url=self.url, state="ready", base=self.config.base,
            base_id=self.config.base_id, max_context=512, running=0, queued=0, queue_limit=100_000,
            kv_blocks_free=1000, kv_blocks=1000, block_tokens=16, acknowledged=acknowledged,
        )  # fmt: skip


def _gap(timeout: float, usual: float) -> float:
    """A call with a timeout of over a minute is one that idles: its second token comes much later."""
    return (timeout - 60.0) if timeout > 60.5 else usual


async def serve(config: StubConfig) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stub = Stub(config, url)
    routes = [
        Route("/generate", stub.generate, methods=["POST"]),
        Route("/invoke/{name}", stub.invoke, methods=["POST"]),
    ]
    app = Starlette(routes=routes)
    settings = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_keep_alive=KEEP_ALIVE)
    server = uvicorn.Server(settings)
    publishing = asyncio.create_task(stub.publish())
    print(url, flush=True)
    await server.serve(sockets=[listener])
    publishing.cancel()


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=StubConfig)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))


if __name__ == "__main__":
    main()
