"""Waits, before the gateway starts, for the manifest of a base model that only a node can make.

Meanwhile the gateway's port answers health checks, takes manifests of nodes, and refuses all else with a reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.base_manifest import find_manifest
from adapters.base_model import OtherFamily, fingerprint, read_family_config
from adapters.errors import AdapterError
from adapters.open_store import open_checked_store
from adapters.store import ObjectStore
from cluster.messages import BASE_PATH
from cluster.secret import read_secret
from gateway.background import background
from gateway.catalog.node_manifests import unavailable
from gateway.config import GatewayConfig
from gateway.http.boundary import Boundary, OpenRequests
from gateway.http.protocol import GatewayHttp
from gateway.routes.cluster import receive_manifest
from gateway.workers.metrics import Metrics

REASON = "the gateway waits for the manifest of its base model, which a node with vLLM sends when it starts"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
STOP_SECONDS = 3
LOOK_SECONDS = 2.0
"""Seconds between two checks of the registry."""

log = logging.getLogger("gateway")


def wait_for_base(config: GatewayConfig) -> bool:
    """Returns once the registry has what the gateway must know of its base model: at once, unless a manifest is missing
    that a node will send. Returns False if a signal ended the wait.

    Raises the exceptions of opening the registry, and of reading the base model.
    """
    if not config.waits_for_base:
        return True
    store = open_checked_store(config.registry)
    if _is_known(config, store):
        return True
    log.warning(REASON, extra={"host": config.host, "port": config.port, "model": config.model_dir})
    server = _server(config, store)
    server.run()
    return _is_known(config, store)


def _is_known(config: GatewayConfig, store: ObjectStore) -> bool:
    directory = Path(config.model_dir)
    try:
        read_family_config(directory)
    except OtherFamily:
        return find_manifest(store, fingerprint(directory)) is not None
    return True


def _server(config: GatewayConfig, store: ObjectStore) -> uvicorn.Server:
    secret = read_secret(Path(config.secret_file))

    async def watch_registry() -> None:
        """Ends the wait when a manifest is stored by other means."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(AdapterError):
                if await asyncio.to_thread(_is_known, config, store):
                    server.should_exit = True

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with background(watch_registry):
            yield

    async def take_base(request: Request) -> Response:
        reply = await receive_manifest(request, secret, store, config, asyncio.to_thread)
        server.should_exit = True
        return reply

    async def healthz(_: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type="application/json")

    async def refuse(_: Request) -> NoReturn:
        raise unavailable(REASON)

    app = Starlette(
        lifespan=lifespan,
        routes=[
            Route(BASE_PATH, take_base, methods=["POST"]),
            Route("/healthz", healthz),
            Route("/health", healthz),
            Route("/{path:path}", refuse, methods=METHODS),
        ],
        middleware=[
            Middleware(Boundary, max_concurrent=config.max_concurrent, metrics=Metrics(), requests=OpenRequests())
        ],
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=GatewayHttp,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
    )
    return server
