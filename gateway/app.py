"""The ASGI application: routes inside the boundary, and services that are created when the server starts."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp

from cluster.logs import CAN_NOT_START
from gateway.batches.calls import Handler, answer_line
from gateway.batches.messages import Endpoint
from gateway.config import GatewayConfig, check_config, share
from gateway.groups import Admin, Calls, Catalog, Nodes
from gateway.http.boundary import Boundary, OpenRequests
from gateway.http.cors import cors
from gateway.http.nearest_route import route_hint
from gateway.http.routing import CallHandler, mounted
from gateway.http.stopwatch import Stopwatch
from gateway.http.upload_folders import remove_abandoned
from gateway.routes import invoke, openai
from gateway.routes.all_routes import ALL
from gateway.services import Services, open_services
from gateway.workers.metrics import Metrics

ROUTES = mounted(ALL)
PATHS = sorted({re.sub(r":\w+}", "}", operation.path) for operation in ALL if operation.summary})
"""Paths of all documented routes."""

STOP_SECONDS = 3.0
"""Seconds for which a stopping server waits for requests that it has cancelled."""
FLUSH_SECONDS = 0.05
"""Seconds that the process waits before it ends, so that the last bytes are sent."""

log = logging.getLogger("gateway")


def create_app(
    config: GatewayConfig, started: Callable[[], None] = lambda: None, metrics: Metrics | None = None
) -> Starlette:
    """Returns the gateway's ASGI app. Raises ConfigError for invalid settings.

    Files are read and clients created when the server starts the app. `started` is called after that, before the first
    request. `metrics`: those of a worker among several; None if this process counts alone.
    """
    check_config(config)
    counted, requests = metrics or Metrics(), OpenRequests()
    limit = share(config.max_concurrent, config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, object]]:
        remove_abandoned(Path(config.tmp_dir))
        async with (
            _opened(config, counted) as services,
            services.calls.event_calls.running(),
            services.calls.batches.runner.running(partial(answer_line, _batch_handlers(services.calls))),
        ):
            started()
            groups = {Calls: services.calls, Catalog: services.catalog, Nodes: services.nodes, Admin: services.admin}
            yield {
                "groups": groups,
                "callers": services.calls.callers,
                "take_rate": services.rate_limiter.take,
                "pools": services.calls.pools,
                "suggestions": services.suggestions,
                "metrics": counted,
            }
            # Requests that the server has cancelled still have to send their errors.
            await requests.wait_for_none(STOP_SECONDS)
            await asyncio.sleep(FLUSH_SECONDS)

    app = Starlette(
        routes=ROUTES,
        lifespan=lifespan,
        middleware=[
            *cors(config.cors_origins),  # outermost, since errors are replies of the boundary
            Middleware(Boundary, max_concurrent=limit, metrics=counted, requests=requests),
        ],
        exception_handlers={HTTPException: _pass_on},
    )
    app.router.redirect_slashes = False
    return app


def _batch_handlers(calls: Calls) -> dict[Endpoint, Handler]:
    """Returns the handlers of the routes that a batch may name, bound to these parts."""

    def bound(handler: CallHandler[Calls]) -> Handler:
        async def answer(request: Request, tenant: str, watch: Stopwatch) -> ASGIApp:
            return await handler(request, calls, tenant, watch)

        return answer

    return {
        "/v1/completions": bound(openai.create_completion),
        "/v1/chat/completions": bound(openai.create_chat_completion),
        "/invoke": bound(invoke.invoke),
    }


@asynccontextmanager
async def _opened(config: GatewayConfig, metrics: Metrics) -> AsyncIterator[Services]:
    """Yields the services. Logs the reason if they can't be opened: the server's own lines only say that it ends."""
    is_open = False
    try:
        async with open_services(config, metrics) as services:
            is_open = True
            yield services
    except Exception as error:
        if not is_open:
            log.error(f"gateway{CAN_NOT_START}", extra={"reason": str(error) or type(error).__name__})
        raise


async def _pass_on(request: Request, error: Exception) -> NoReturn:
    if isinstance(error, HTTPException) and error.status_code == HTTPStatus.NOT_FOUND:
        raise HTTPException(error.status_code, f"no such route{route_hint(request.url.path, PATHS)}")
    raise error  # the boundary formats all errors in the same way
