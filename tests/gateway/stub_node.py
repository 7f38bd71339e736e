"""A node without a model: a real HTTP server that speaks cluster.messages and echoes the prompt's token ids."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import httpx
import msgspec
from served_app import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cluster.frames import frame
from cluster.http_protocol import BoundedHttp
from cluster.messages import (
    Adapter,
    ColdStart,
    Done,
    Event,
    Failed,
    GenerateRequest,
    Started,
    Timing,
    Token,
    TokenLogprob,
    TopLogprob,
    encode_event,
)
from cluster.news import NodeRecord, Resident, full_report
from cluster.received import Received
from cluster.residency import Moved, PrefetchOrder
from cluster.secret import authorization, is_authorized

Script = Callable[["StubNode", GenerateRequest], AsyncIterator[Event | bytes]]
"""What the node answers: events, or raw bytes; raising Cut ends the connection abruptly."""


_epochs = count()


class Cut(Exception):
    """Ends the connection abruptly."""


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class StubNode:
    node_id: str
    base: str
    secret: str
    max_context: int
    script: Script
    url: str = ""
    epoch: str = field(default_factory=lambda: f"e{next(_epochs)}")
    """Another one for each: a node that has the name of an earlier one is a process that was started anew."""
    seq: int = 0
    received: list[GenerateRequest] = field(default_factory=list)
    prefetched: list[Adapter] = field(default_factory=list)
    disconnected: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    places: Received = field(default_factory=Received)
    asked: int = 0
    """How often the gateway has asked for its record."""
    state: str = "ready"
    """What it says then."""
    answers: bool = True
    """False: it is asked in vain."""
    answer_after: threading.Event = field(default_factory=_set)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/record", self.tell_record),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/adapters/prefetch", self.prefetch, methods=["POST"]),
            ]
        )

    async def generate(self, request: Request) -> Response:
        if not is_authorized(request.headers.get("authorization"), self.secret):
            return Response(status_code=401)
        asked = msgspec.msgpack.decode(await request.body(), type=GenerateRequest)
        self.received.append(asked)
        self.places = self.places.with_one(asked.place)
        return _Stream(self, asked)

    async def tell_record(self, request: Request) -> Response:
        if not is_authorized(request.headers.get("authorization"), self.secret):
            return Response(status_code=401)
        self.asked += 1
        await self.until(self.answer_after)
        report = full_report(self.record(self.state), [])
        return Response(msgspec.msgpack.encode(report), 200 if self.answers else 503)

    async def prefetch(self, request: Request) -> Response:
        """Says that a load began, which never ends."""
        if not is_authorized(request.headers.get("authorization"), self.secret):
            return Response(status_code=401)
        adapter = msgspec.msgpack.decode(await request.body(), type=PrefetchOrder).adapter
        self.prefetched.append(adapter)
        return Response(msgspec.msgpack.encode(Moved(adapter.digest, None)), 202)

    def record(self, state: str = "ready", **changed: object) -> NodeRecord:
        self.seq += 1
        record = NodeRecord(
            id=self.node_id,
            epoch=self.epoch,
            seq=self.seq,
            url=self.url,
            state=state,
            base=self.base,
            base_id="stub",
            max_context=self.max_context,
            running=0,
            queued=0,
            queue_limit=64,
            kv_blocks_free=100,
            kv_blocks=100,
            block_tokens=16,
            received=self.places,
        )
        if state == "warming":  # as a node whose engine has not said yet what it has
            unknown = {"base": "", "max_context": 0, "kv_blocks": 0, "kv_blocks_free": 0}
            record = msgspec.structs.replace(record, **unknown)
        return msgspec.structs.replace(record, **changed)

    def publish(
        self, gateway_url: str, state: str = "ready", residents: list[Resident] | None = None, **changed: object
    ) -> httpx.Response:
        held = [Resident(digest="0" * 64, tier="host", bytes=1, in_use=0)] if residents is None else residents
        return httpx.post(
            f"{gateway_url}/cluster/record",
            content=msgspec.msgpack.encode(full_report(self.record(state, **changed), held)),
            headers=authorization(self.secret),
            timeout=60,
            verify=False,  # there is no TLS: to read the certificates of all authorities takes longer
        )

    async def until(self, event: threading.Event) -> None:
        """Awaits a threading.Event without holding up the server."""
        await asyncio.to_thread(event.wait, 60)


class _Stream(StreamingResponse):
    def __init__(self, node: StubNode, asked: GenerateRequest) -> None:
        self._node = node
        self._ended = False
        super().__init__(self._frames(asked), media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._ended:
                self._node.disconnected.set()

    async def _frames(self, asked: GenerateRequest) -> AsyncIterator[bytes]:
        async for item in self._node.script(self._node, asked):
            yield item if isinstance(item, bytes) else encode_event(item)
            self._node.began.set()
        self._ended = True


DEVICE_SECONDS = 0.015
"""Of each request, by its Done."""


def timing() -> Timing:
    cold = ColdStart("host", "wait", 0.03, 0.01)
    return Timing(queue=0.001, prefill=0.02, total=0.05, cold_start=cold, device=DEVICE_SECONDS)


def done(asked: GenerateRequest, completion: int, reason: str = "length", text: str = "") -> Done:
    return Done(
        finish_reason=reason,
        prompt_tokens=len(asked.token_ids),
        completion_tokens=completion,
        cached_tokens=0,
        timing=timing(),
        text=text,
    )


def token(index: int, text: str, logprobs: int | None = None) -> Token:
    entries: list[TokenLogprob] = []
    if logprobs is not None:
        top = [TopLogprob(token=text, token_id=100 + rank, logprob=-0.5 - rank) for rank in range(logprobs)]
        offset = sum(len(f" t{before}") for before in range(index))
        entries = [TokenLogprob(token=text, token_id=100 + index, logprob=-0.5, top=top, offset=offset)]
    return Token(text=text, token_ids=[100 + index], index=index, logprobs=entries)


async def echo(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """`max_tokens` tokens (at most 8), each naming its index; behind those that another node has generated."""
    count = min(asked.max_tokens, 8)
    yield Started(node=node.node_id, cold_start="host" if asked.adapter else "none")
    for index in range(len(asked.generated), count):
        yield token(index, f" t{index}", asked.sampling.logprobs)
    yield done(asked, count)


async def hang_after_first(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    yield token(0, "first")
    await node.until(node.go_on)
    yield token(1, " second")
    yield done(asked, 2)


async def hang_before_first(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    await node.until(node.go_on)
    yield token(0, "late")
    yield done(asked, 1)


async def flood(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """More than socket buffers hold."""
    yield Started(node=node.node_id, cold_start="none")
    for index in range(4000):
        yield Token(text="x" * 65536, token_ids=[1], index=index)
        await asyncio.sleep(0)  # lets the server see that its peer has gone
    yield done(asked, 4000)


async def refuse(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Failed(type="unavailable", message="the engine is warming", retryable=True, retry_after=1.0)


async def refuse_for_good(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Failed(type="validation_failed", message="not with me")


async def die_after_first(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    yield token(0, "first")
    await node.until(node.go_on)
    raise Cut


async def die_behind(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    """After one token more."""
    index = len(asked.generated)
    yield Started(node=node.node_id, cold_start="none")
    yield token(index, f" t{index}", asked.sampling.logprobs)
    raise Cut


async def die_at_once(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield Started(node=node.node_id, cold_start="none")
    raise Cut


async def garbage(node: StubNode, asked: GenerateRequest) -> AsyncIterator[Event | bytes]:
    yield frame(b"\xc1 not msgpack")


@contextmanager
def stub_node(node: StubNode) -> Iterator[StubNode]:
    async def quiet(scope, receive, send):
        try:
            await app(scope, receive, send)
        except Cut:
            raise ConnectionAbortedError from None  # uvicorn closes a half-sent reply's connection

    app = node.app()
    with served(quiet, http=BoundedHttp) as url:
        node.url = url
        try:
            yield node
        finally:
            node.go_on.set()
