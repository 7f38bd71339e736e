"""A node as raw bytes on a socket, and a NodeClient that asks it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import aiohttp
import uvloop

from cluster.errors import ServiceError
from cluster.messages import ColdStart, Event, GenerateRequest, Sampling, Timing
from cluster.news import NodeRecord, NodeReport, full_report
from cluster.state import ClusterState, MemoryClusterState
from gateway.calls.breaker import Breakers
from gateway.calls.node_client import NodeClient
from gateway.calls.node_watch import NodeWatches
from gateway.scheduling.route import Route

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Serve = Callable[[Reader, Writer], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TIMING = Timing(queue=0.0, prefill=0.0, total=0.0, cold_start=ColdStart("none", "none", 0.0, 0.0))
END = b"0\r\n\r\n"
REQUEST = GenerateRequest("inv_1-0", "b", "t", [1, 2], 2, Sampling(), 60.0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """On both event loops: the gateway's, and the one of a process without it. Nothing may be left to the loop to
    complain of."""
    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(bounded(main))


async def bounded(main: Callable[[], Awaitable[None]]) -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with asyncio.timeout(60):
        await main()
    assert not complaints


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


async def request_of(reader: Reader) -> tuple[bytes, bytes]:
    """Head and body. Raises IncompleteReadError when no more come."""
    head = await reader.readuntil(b"\r\n\r\n")
    (size,) = (int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: "))
    return head, await reader.readexactly(size)


@asynccontextmanager
async def node(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[str, list[int]]]:
    """Its url, and one entry per connection made to it."""
    made: list[int] = []

    async def accepted(reader: Reader, writer: Writer) -> None:
        made.append(1)
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway has gone
        finally:
            writer.close()

    server = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}", made
    finally:
        server.close()


async def in_vain(node_id: str) -> None:
    """Asks a node that does not answer for its record."""


@asynccontextmanager
async def node_client(
    state: ClusterState | None = None, *, silence: float = 600.0, connect: float = 5.0
) -> AsyncIterator[NodeClient]:
    connector = aiohttp.TCPConnector(limit=0)
    state = state or await recorded(("n", "1"))
    watches = NodeWatches(state, silence=silence, first_silence=silence, ask=in_vain)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
        yield NodeClient(session, "hush", watches, connect=connect, breakers=Breakers(time.monotonic))


class Watched(MemoryClusterState):
    """Notes how often the watch of a node has looked."""

    looks = 0

    async def seconds_since_report(self, node_id: str, epoch: str) -> float:
        self.looks += 1
        return await super().seconds_since_report(node_id, epoch)

    async def looked(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Returns when it has looked from now on, and ended what is to end. Whoever `ended` last takes it along."""
        before = self.looks
        while self.looks < before + 2 and not ended():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def recorded(*nodes: tuple[str, str], clock: Callable[[], float] = time.monotonic) -> Watched:
    """A state in which these nodes (id, epoch) have sent one record, now."""
    state = Watched(clock)
    for node_id, epoch in nodes:
        assert await state.publish(record(node_id, epoch)) == "taken"
    return state


def record(node_id: str, epoch: str, seq: int = 1) -> NodeReport:
    found = NodeRecord(
        id=node_id,
        epoch=epoch,
        seq=seq,
        url="http://127.0.0.1:1",
        state="ready",
        base="b",
        base_id="b",
        max_context=512,
        running=0,
        queued=0,
        queue_limit=64,
        kv_blocks_free=100,
        kv_blocks=100,
        block_tokens=16,
    )
    return full_report(found)


async def ask(
    client: NodeClient, url: str, request: GenerateRequest = REQUEST, into: list[Event] | None = None
) -> list[Event]:
    """All events of one request; `into` has those that came before a failure, too."""
    revoked: asyncio.Future[ServiceError] = asyncio.get_running_loop().create_future()
    events: list[Event] = [] if into is None else into
    async with aclosing(client.stream(Route("n", "1", url), request, revoked)) as coming:
        async for event in coming:
            events.append(event)
    return events
