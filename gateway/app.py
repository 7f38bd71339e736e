"""The application: routes inside the boundary, services made when the server starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request

from gateway.batches.calls import answer_line
from gateway.config import GatewayConfig, check_config, share
from gateway.events.calls import running_events
from gateway.http.boundary import Boundary, OpenRequests
from gateway.http.routing import mounted
from gateway.http.upload_folders import remove_abandoned
from gateway.routes.all_routes import ALL
from gateway.services import Services, open_services
from gateway.workers.metrics import Metrics

ROUTES = mounted(ALL)

STOP_SECONDS = 3.0
"""For which the end of the server waits for requests that it has cancelled."""
FLUSH_SECONDS = 0.05
"""For the last bytes to leave the process."""


def create_app(config: GatewayConfig, started: Callable[[], None] = lambda: None) -> Starlette:
    """Returns the gateway's ASGI app. Files are read and clients made when the server starts it; `started` is called
    after that, before the first request. Raises ConfigError, at once, for settings that are wrong in themselves."""
    check_config(config)
    counted, requests = Metrics(), OpenRequests()
    limit = share(config.max_concurrent, config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, Services]]:
        remove_abandoned(Path(config.tmp_dir))
        async with (
            open_services(config, counted) as services,
            running_events(services),
            services.batches.runner.running(partial(answer_line, services)),
        ):
            started()
            yield {"services": services}
            # Cancelled by the server, they still have to say so.
            await requests.wait_for_none(STOP_SECONDS)
            await asyncio.sleep(FLUSH_SECONDS)

    app = Starlette(
        routes=ROUTES,
        lifespan=lifespan,
        middleware=[Middleware(Boundary, max_concurrent=limit, metrics=counted, requests=requests)],
        exception_handlers={HTTPException: _pass_on},
    )
    app.router.redirect_slashes = False
    return app


async def _pass_on(_: Request, error: Exception) -> NoReturn:
    raise error  # the boundary makes all replies to errors, so that they have one shape
