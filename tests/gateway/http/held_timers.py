"""Timers of connections whose time passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Event
from typing import Any

from running_gateway import until

from cluster.http_protocol import BoundedHttp


class HeldTimers:
    """Those of all connections to a server in another thread; the server speaks `HeldTimers().of(GatewayHttp)`."""

    def __init__(self) -> None:
        self.running: set[_Handle] = set()

    def of(self, http: type[BoundedHttp]) -> type[BoundedHttp]:
        """Returns the protocol with such timers."""
        timers = self

        class Held(http):  # type: ignore[misc,valid-type]
            def __init__(self, *args: Any, _loop: asyncio.AbstractEventLoop | None = None, **kwargs: Any) -> None:
                super().__init__(*args, _loop=_Loop(_loop or asyncio.get_running_loop(), timers.running), **kwargs)

        return Held

    @property
    def seconds(self) -> set[float]:
        """How long the timers that run now were started for."""
        return {handle.seconds for handle in list(self.running)}

    def pass_time(self) -> None:
        """The time of all that run now has passed; returns when what they call has been called."""
        for handle in list(self.running):
            gone_off = Event()
            handle.loop.call_soon_threadsafe(handle.go_off, gone_off)
            assert gone_off.wait(60)

    def pass_next(self) -> None:
        """The same, as soon as one runs."""
        until(lambda: bool(self.running))
        self.pass_time()


class _Loop:
    """An event loop that calls nothing later by itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, running: set[_Handle]) -> None:
        self._loop, self._running = loop, running

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> _Handle:
        return _Handle(self._loop, self._running, seconds, lambda: callback(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class _Handle:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        running: set[_Handle],
        seconds: float,
        callback: Callable[[], object],
    ) -> None:
        self.loop, self._running, self.seconds, self._callback = loop, running, seconds, callback
        running.add(self)

    def cancel(self) -> None:
        self._running.discard(self)

    def go_off(self, gone_off: Event) -> None:
        if self in self._running:  # it was not cancelled meanwhile
            self.cancel()
            self._callback()
        gone_off.set()
