"""A node without a model, timed by the simulator's own node, in real time.

It speaks the nodes' protocol. A call's seed says how long its answer is, which no gateway knows (it stays below
`max_tokens`). Tokens come in pieces, the first by itself, so that the gateway's work per token is not what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from math import inf

import aiohttp
import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from benchmarks.gateway.stub_node import TIMING
from cluster.messages import Done, GenerateRequest, Started, Token, encode_event
from cluster.news import RECORD_INTERVAL, NodeRecord, full_report
from cluster.received import Received
from cluster.secret import authorization
from garnish.simulation.columns import as_served, record_of, residents_of
from garnish.simulation.job import Job
from garnish.simulation.node import SimulatedNode
from garnish.simulation.profile import NodeProfile

PIECE_SECONDS = 0.3


class ModelNodeConfig(msgspec.Struct, frozen=True):
    gateway: str
    secret: str
    base: str
    base_id: str
    max_context: int
    profile: NodeProfile
    name: str


@dataclass
class Reply:
    job: Job
    generated: int
    """tokens that another node had sent"""
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ModelNode:
    """A simulated node on the clock `time.monotonic`, brought up to now before anything else."""

    def __init__(self, config: ModelNodeConfig, url: str) -> None:
        self._config, self._url = config, url
        self._node = SimulatedNode(0, config.profile, lambda _: None)
        self._replies: list[Reply] = []
        self._calls, self._seq = 0, 0
        self._timer: asyncio.TimerHandle | None = None
        self._received = Received()

    async def generate(self, request: Request) -> Response:
        call = msgspec.msgpack.decode(await request.body(), type=GenerateRequest)
        self._catch_up()
        reply = Reply(self._job(call), len(call.generated))
        self._replies.append(reply)
        self._node.submit(reply.job, reply.job.at)
        self._node.acknowledged.clear()
        self._received = self._received.with_one(call.place)
        self._catch_up()
        return StreamingResponse(self._frames(reply))

    async def _frames(self, reply: Reply) -> AsyncIterator[bytes]:
        yield encode_event(Started(node=self._config.name, cold_start="none"))
        await asyncio.wait_for(reply.first.wait(), 600)
        yield _tokens(reply.generated, reply.generated + 1)
        sent = reply.generated + 1
        while sent < reply.job.output:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reply.ended.wait(), PIECE_SECONDS)
            done = reply.job.output if reply.ended.is_set() else self._node.tokens(reply.job, time.monotonic())
            if done > sent:
                yield _tokens(sent, done)
                sent = done
        await asyncio.wait_for(reply.ended.wait(), 600)
        yield encode_event(Done("length", reply.job.prompt, reply.job.output, 0, TIMING))

    def _job(self, call: GenerateRequest) -> Job:
        self._calls += 1
        adapter, profile = call.adapter, self._config.profile
        rank = max(adapter.ranks, default=0) if adapter else 0
        return Job(
            number=self._calls,
            at=time.monotonic(),
            digest=adapter.digest if adapter else None,
            rank=rank,
            bytes=rank * profile.bytes_per_rank,
            prompt=len(call.token_ids),
            generated=len(call.generated),
            moves=int(bool(call.generated)),
            output=min(max(1, call.sampling.seed), call.max_tokens),
            max_tokens=call.max_tokens,
            tenant=call.tenant,
            ttft_slo=call.ttft,
            tpot_slo=call.tpot,
        )

    def _catch_up(self) -> None:
        """Runs all events until now, each at its time, and sets a timer for the next one."""
        node, loop = self._node, asyncio.get_running_loop()
        while node.next_time <= time.monotonic():
            node.wake(node.next_time)
        for reply in self._replies:
            if reply.job.first_token:
                reply.first.set()
            if reply.job.outcome:
                reply.ended.set()
        self._replies = [reply for reply in self._replies if not reply.ended.is_set()]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if node.next_time != inf:
            self._timer = loop.call_later(max(0.0, node.next_time - time.monotonic()), self._catch_up)

    async def publish(self) -> None:
        """Publishes records until cancelled, as `node_agent/api/publisher.py`. The gateway may not be there yet."""
        headers = {**authorization(self._config.secret), "content-type": "application/msgpack"}
        url = self._config.gateway + "/cluster/record"
        async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                news = full_report(self._record(), residents_of(self._node))
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    await session.post(url, data=msgspec.msgpack.encode(news))
                await asyncio.sleep(RECORD_INTERVAL)

    def _record(self) -> NodeRecord:
        self._seq += 1
        config = self._config
        record = record_of(self._node, time.monotonic(), self._seq)
        return msgspec.structs.replace(
            record,
            received=self._received,
            performance=as_served(self._node.profile.performance, config.base),
            id=config.name, url=self._url, base=config.base, base_id=config.base_id, max_context=config.max_context,
        )  # fmt: skip


def _tokens(begin: int, end: int) -> bytes:
    return encode_event(Token(text="x", token_ids=list(range(begin, end)), index=begin))


async def serve(config: ModelNodeConfig) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    node = ModelNode(config, f"http://127.0.0.1:{listener.getsockname()[1]}")
    app = Starlette(routes=[Route("/generate", node.generate, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, ws="none"))
    publishing = asyncio.create_task(node.publish())
    print("ready", flush=True)
    await server.serve(sockets=[listener])
    publishing.cancel()


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ModelNodeConfig)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))


if __name__ == "__main__":
    main()
