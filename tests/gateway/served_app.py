"""Runs ASGI applications under a real uvicorn, in a thread, on a free loopback port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from cluster.http_protocol import BoundedHttp
from gateway.http.protocol import GatewayHttp


@contextmanager
def served(
    app: ASGIApp, *, http: type[BoundedHttp] = GatewayHttp, grace: int = 5, keep_alive: int = 5
) -> Iterator[str]:
    """Yields the URL once the server has started; raises when its lifespan fails."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=http, ws="none", log_config=None, lifespan="on", timeout_graceful_shutdown=grace,
        timeout_keep_alive=keep_alive,
    )  # fmt: skip
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert server.settled.wait(60)
        assert server.started, "the server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.settled.set()
