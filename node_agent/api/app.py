"""Service of a node's API process: HTTP to the gateway, one socket to the engine. Run as `python -m node_agent.api`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.descriptors import raise_limit
from cluster.errors import ServiceError
from cluster.http_protocol import BoundedHttp, mark_keyed
from cluster.logs import set_up_logging
from cluster.news import RECORD_INTERVAL
from cluster.secret import is_authorized, read_secret
from cluster.text import BaseText
from node_agent.api.adapters import adapter_routes
from node_agent.api.detokenize import TokenText
from node_agent.api.engine_link import EngineLink
from node_agent.api.generate import Generate
from node_agent.api.metrics import metrics_routes
from node_agent.api.publisher import Publisher
from node_agent.api.request import read_limits
from node_agent.api.requests import RequestRegistry
from node_agent.child import die_with_parent, read_config
from node_agent.config import ApiProcessConfig, NodeConfig
from node_agent.gpu.sampler import Sampler
from node_agent.gpu.watch import GpuWatch
from node_agent.heartbeat import Watch

NOTICE_SECONDS = 0.3
"""Seconds between a stop signal and the end of listening. Meanwhile the gateway learns of the stop and sends no more
requests."""
KEEP_ALIVE = 90
"""Seconds that an idle connection stays open. It is longer than on gateways, so that they never use a connection that
is being closed here."""
LOOK_S = 0.2
"""Seconds between two checks of the engine's heartbeat."""


def create_app(
    config: NodeConfig,
    engine_socket: Path,
    registry: RequestRegistry,
    secret: str,
    interval: float = RECORD_INTERVAL,
    heartbeat: int | None = None,
) -> ASGIApp:
    """Returns the service of one node. Its lifespan listens for the engine and publishes the node's record every
    `interval` seconds. `heartbeat`: as in ApiProcessConfig."""
    text = BaseText(Path(config.engine.model_dir))
    generate = Generate(registry, TokenText(text), config.node_id)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        link = EngineLink(engine_socket, registry)
        registry.attach(link)
        await link.start()
        publishing = asyncio.create_task(Publisher(registry, config.gateway_url, secret, interval).run())
        watching = asyncio.create_task(watch_engine(registry, heartbeat))
        try:
            yield
        finally:
            publishing.cancel()
            watching.cancel()
            await asyncio.wait({publishing, watching})
            await link.stop()

    async def healthz(_request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def record(_request: Request) -> Response:
        return Response(msgspec.msgpack.encode(registry.all_news()), media_type="application/msgpack")

    async def drain(_request: Request) -> Response:
        registry.draining = True
        return Response(status_code=204)

    async def undrain(_request: Request) -> Response:
        registry.draining = False
        return Response(status_code=204)

    routes = [
        Route("/healthz", healthz),
        Route("/record", record),
        Route("/drain", drain, methods=["POST"]),
        Route("/undrain", undrain, methods=["POST"]),
        Route("/generate", generate, methods=["POST"]),
        *adapter_routes(registry),
        *metrics_routes(registry),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={ServiceError: _answer_error})
    return RequireSecret(app, secret)


async def watch_engine(registry: RequestRegistry, heartbeat: int | None) -> None:
    """Reports to the registry, until cancelled, how long the engine's heartbeat in the memory `heartbeat` is overdue.

    A hung engine keeps its connection, so the connection does not show it. Without a heartbeat nothing is reported.
    """
    if heartbeat is None:
        return
    watch = Watch(heartbeat, LOOK_S)
    while True:
        registry.engine_silent(watch.overdue(time.monotonic()))
        await asyncio.sleep(LOOK_S)


class RequireSecret:
    """Middleware that requires the cluster secret, except for /healthz."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/healthz":
            header = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
            if not is_authorized(header, self._secret):
                error = ServiceError("unauthenticated", "the cluster secret is missing or wrong")
                await error_response(error)(scope, receive, send)
                return
            mark_keyed(scope)
        await self._app(scope, receive, send)


def error_response(error: ServiceError) -> Response:
    headers = {} if error.retry_seconds is None else {"retry-after": str(error.retry_seconds)}
    body = {"error": {"type": error.type, "message": error.message}}
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _answer_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(error)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. It is opened before the server starts, so that the port (0: a free one) can be
    announced."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=512)


def url_of(listener: socket.socket, gateway_url: str) -> str:
    """Returns the URL at which the gateway reaches this node. A listener on all addresses is announced with the address
    that faces the gateway."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        host = _address_towards(gateway_url)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _address_towards(url: str) -> str:
    """Returns this host's address on the route to `url`. Sends nothing: the kernel only chooses a route."""
    target = urlsplit(url)
    addresses = socket.getaddrinfo(target.hostname, target.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class _Server(uvicorn.Server):
    """Server that reports the node as draining before it stops, and then lets open streams finish."""

    def __init__(self, config: uvicorn.Config, registry: RequestRegistry) -> None:
        super().__init__(config)
        self._registry = registry

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._registry.draining = True
        await asyncio.sleep(NOTICE_SECONDS)
        await super().shutdown(sockets)


async def serve(config: ApiProcessConfig) -> None:
    """Serves until SIGTERM or SIGINT."""
    node = config.node
    secret = read_secret(Path(node.secret_file))
    listener = listen(node.host, node.port)
    sampler = Sampler(node.engine.gpu) if node.engine.gpu else None
    registry = RequestRegistry(node, read_limits(Path(node.engine.model_dir)), gpu=GpuWatch(sampler))
    registry.url = url_of(listener, node.gateway_url)
    server = _Server(
        uvicorn.Config(
            create_app(node, Path(config.socket), registry, secret, heartbeat=config.heartbeat),
            http=BoundedHttp,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=math.ceil(node.stop_seconds),
        ),
        registry,
    )
    if sampler is not None:
        sampler.start()
    try:
        await server.serve(sockets=[listener])
    finally:
        if sampler is not None:
            sampler.close()


def main() -> None:
    config = read_config(ApiProcessConfig)
    die_with_parent(config.parent)
    set_up_logging("api")
    raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))
