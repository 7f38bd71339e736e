"""A node's API process inside a test: the real application on a real port, a gateway that collects its records."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import uvicorn
import uvloop
from aiohttp import web

from cluster.frames import Frames
from cluster.http_protocol import BoundedHttp
from cluster.messages import Event, GenerateRequest, Sampling, decode_event
from cluster.news import FULL_REPORT, Facts, NodeRecord, NodeReport, Resident, record_from
from cluster.secret import authorization, create_secret
from node_agent.api.app import create_app, listen, url_of
from node_agent.api.request import read_limits
from node_agent.api.requests import RequestRegistry
from node_agent.config import EngineConfig, NodeConfig
from node_agent.heartbeat import heartbeat_memory
from node_agent.ipc import Ready
from tests.node_agent.scripted_engine import READY, ScriptedEngine

SECONDS = 200.0
"""Bound of one scenario."""
INTERVAL_S = 0.02
"""Between two records: scenarios wait for many."""


class Gateway:
    """Receives news, as the gateway does; `status` is what it answers."""

    def __init__(self) -> None:
        self.status = 204
        self.news: list[NodeReport] = []
        """All that were answered by 204."""
        self.records: asyncio.Queue[NodeRecord] = asyncio.Queue()
        self._facts: Facts | None = None
        self.authorizations: set[str | None] = set()

    async def receive(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("authorization"))
        told = msgspec.msgpack.decode(await request.read(), type=NodeReport)
        self._facts = told.facts or self._facts
        assert self._facts is not None, "facts come first"
        self.records.put_nowait(record_from(told.heartbeat, self._facts))
        if self.status == 204:
            self.news.append(told)
        return web.Response(status=self.status)

    async def record_where(self, condition: Callable[[NodeRecord], bool]) -> NodeRecord:
        """The next record for which the condition holds."""
        while not condition(record := await self.records.get()):
            pass
        return record


class Node:
    """A served node and the means to talk to it from both sides."""

    def __init__(
        self,
        url: str,
        engine_socket: Path,
        secret: str,
        registry: RequestRegistry,
        gateway: Gateway,
        heartbeat: int,
    ) -> None:
        self.url = url
        self.heartbeat = heartbeat
        self.socket = engine_socket
        self.secret = secret
        self.registry = registry
        self.gateway = gateway
        self.engines: list[ScriptedEngine] = []
        self.residents: list[Resident] = []
        """As `record` was told last."""
        self.session = aiohttp.ClientSession(headers=authorization(secret))

    async def engine(self, ready: Ready = READY) -> ScriptedEngine:
        """A new engine that has said Ready, known to the API process."""
        engine = await ScriptedEngine.connect(self.socket, ready)
        self.engines.append(engine)
        await self.record_where(lambda record: record.state == "ready")
        return engine

    async def record(self) -> NodeRecord:
        async with self.session.get(self.url + "/record") as response:
            assert response.status == 200
            told = msgspec.msgpack.decode(await response.read(), type=NodeReport)
            assert told.facts is not None and told.changes.since == FULL_REPORT
            self.residents = told.changes.residents
            return record_from(told.heartbeat, told.facts)

    async def record_where(self, condition: Callable[[NodeRecord], bool]) -> NodeRecord:
        """The first record from now on for which the condition holds."""
        now = await self.record()
        if condition(now):
            return now
        return await self.gateway.record_where(lambda record: record.seq > now.seq and condition(record))

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerateRequest | bytes) -> AsyncIterator[Stream]:
        body = request if isinstance(request, bytes) else msgspec.msgpack.encode(request)
        async with self.session.post(self.url + "/generate", data=body) as response:
            yield Stream(response)


class Stream:
    """The events of one reply."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._frames = Frames()
        self._events: list[Event] = []

    async def next(self) -> Event:
        while not self._events:
            chunk = await self.response.content.readany()
            assert chunk, "the reply ended without Done or Failed"
            self._events += [decode_event(body) for body in self._frames.feed(chunk)]
        return self._events.pop(0)

    async def rest(self) -> list[Event]:
        """All events until the reply ends."""
        events, self._events = self._events, []
        async for chunk in self.response.content.iter_any():
            events += [decode_event(body) for body in self._frames.feed(chunk)]
        return events


def node_config(directory: Path, model_dir: Path, gateway_url: str, **engine: object) -> NodeConfig:
    return NodeConfig(
        node_id="n1",
        gateway_url=gateway_url,
        secret_file=str(directory / "cluster.secret"),
        run_dir=str(directory / "run"),
        engine=EngineConfig(
            model_dir=str(model_dir), base_id="stories260K", registry=str(directory / "registry"), **engine
        ),
    )


@contextlib.asynccontextmanager
async def served_node(directory: Path, model_dir: Path, backstop: float = 5.0, **engine: object) -> AsyncIterator[Node]:
    gateway = Gateway()
    secret = create_secret(directory / "cluster.secret")
    async with gateway_server(gateway) as gateway_url:
        config = node_config(directory, model_dir, gateway_url, **engine)
        registry = RequestRegistry(config, read_limits(model_dir), backstop)
        listener = listen(config.host, config.port)
        registry.url = url_of(listener, gateway_url)
        engine_socket = Path(config.run_dir) / "engine.sock"
        heartbeat = heartbeat_memory()
        app = create_app(config, engine_socket, registry, secret, INTERVAL_S, heartbeat)
        server = Server(uvicorn.Config(app, http=BoundedHttp, log_config=None, lifespan="on"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        node = Node(registry.url, engine_socket, secret, registry, gateway, heartbeat)
        try:
            await gateway.records.get()
            yield node
        finally:
            for engine in node.engines:
                await engine.close()
            await node.session.close()
            server.ending.set()
            await serving
            os.close(heartbeat)


class Server(uvicorn.Server):
    """A uvicorn server that ends when it is told to. uvicorn looks ten times a second, and pauses as it ends."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in [*self.servers, *(sockets or [])]:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:  # of callers that are gone
            _, left = await asyncio.wait(self.server_state.tasks, timeout=1.0)
            for task in left:
                task.cancel()
        await self.lifespan.shutdown()


@contextlib.asynccontextmanager
async def gateway_server(gateway: Gateway) -> AsyncIterator[str]:
    """Serves `gateway` on a free port; gives its URL."""
    app = web.Application()
    app.router.add_post("/cluster/record", gateway.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def request_of(id: str = "r1", **fields: object) -> GenerateRequest:
    values: dict[str, object] = {
        "id": id,
        "base": "fingerprint",
        "tenant": "demo",
        "token_ids": [1],
        "max_tokens": 100,
        "sampling": Sampling(temperature=0.0),
        "timeout": 60.0,
    }
    return GenerateRequest(**{**values, **fields})


def run_scenario(scenario: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await scenario

    uvloop.run(bounded())
