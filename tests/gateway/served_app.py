"""Runs ASGI applications under a real uvicorn, in a thread, on a free loopback port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.types import ASGIApp

from cluster.http_protocol import BoundedHttp
from gateway.http.protocol import GatewayHttp

TICK_SECONDS = 0.1
LOOK_SECONDS = 0.005
"""Between two looks whether all connections and requests have ended, once the server ends."""


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
        server.leave()
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


class _Server(uvicorn.Server):
    """Ends as uvicorn's own does, without its pauses of a tenth of a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.settled = threading.Event()
        self._leaves = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def leave(self) -> None:
        """Called from another thread."""
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._leaves.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            await super().startup(sockets)
        finally:
            self.settled.set()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaves.wait(), TICK_SECONDS)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in (*self.servers, *(sockets or [])):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()
