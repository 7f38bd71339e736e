"""One connection to Redis for everything that a worker asks: commands go out as they come, answers come in that order.

redis-py connects, with TLS, user and database as the address says. From then on hiredis reads the answers where they
arrive: a connection from a pool, a task for each write and a timer for each read are more work than the call, and each
makes it wait for one more turn of the event loop (docs/scheduling.md).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import hiredis
from redis.asyncio import ConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

MAX_ASKED = 10_000
"""Commands under way."""
GRACE_SECONDS = 0.02
"""In which what has come is read."""

Value = str | bytes | int | float


class WireFull(Exception):
    """MAX_ASKED answers are still to come; the wire goes on."""


async def open_wire(
    url: str,
    *,
    connect_seconds: float,
    call_seconds: float,
    on_lost: Callable[[Exception], None],
    on_message: Callable[[bytes, bytes], None] | None = None,
) -> RedisWire:
    """Raises RedisError, OSError or TimeoutError. For `on_lost` and `on_message` see RedisWire."""
    pool = ConnectionPool.from_url(
        url,
        socket_timeout=call_seconds,
        socket_connect_timeout=connect_seconds,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    connection: AbstractConnection = pool.make_connection()  # type: ignore[no-untyped-call]
    await connection.connect()  # type: ignore[no-untyped-call]
    return RedisWire(connection, call_seconds, on_lost, on_message)


class RedisWire(asyncio.Protocol):
    """`connection` must be connected; it is the wire's from here on. When an answer takes longer than `call_seconds`
    the wire is lost: what comes later on it could not come in time either.

    `on_lost` is called once with the reason, unless the wire was closed; `on_message` with channel and payload of each
    message, before anything that was sent later is read. Neither may raise.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        call_seconds: float,
        on_lost: Callable[[Exception], None],
        on_message: Callable[[bytes, bytes], None] | None,
    ) -> None:
        self._connection, self._call_seconds = connection, call_seconds
        self._on_lost, self._on_message = on_lost, on_message
        self._reader = hiredis.Reader()
        self._asked: deque[tuple[float, asyncio.Future[Any]]] = deque()
        """When, by the event loop's clock, and who waits for the answer."""
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        """One for all answers: a timer for each would cost as much as reading it."""
        self.closed = False
        writer = connection._writer  # it has no other way to the socket that it has opened
        assert writer is not None
        self._transport = writer.transport
        self._transport.set_protocol(self)

    def ask(self, *command: Value) -> asyncio.Future[Any]:
        """Sent at once; the future gets the answer, or hiredis.ReplyError when Redis refuses, ConnectionError when the
        wire is lost, TimeoutError when an answer takes too long. Raises ConnectionError when nothing can be sent,
        and WireFull."""
        if self.closed or self._transport.is_closing():
            raise ConnectionError("the connection is closed")
        if len(self._asked) >= MAX_ASKED:
            raise WireFull(f"{MAX_ASKED} answers are still to come")
        answer = self._loop.create_future()
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # says a tuple of one
        self._asked.append((self._loop.time(), answer))
        if self._watch is None:
            self._watch = self._loop.call_later(self._call_seconds, self._look)
        return answer

    async def close(self) -> None:
        """Whoever waits for an answer gets ConnectionError. May be called again."""
        self.abort()
        await self._connection.disconnect(nowait=True)

    def abort(self) -> None:
        """As `close`, at once."""
        if not self.closed:
            self.closed = True
            self._transport.abort()
            self._refuse(ConnectionError("the connection was closed"))

    def _look(self, *, again: bool = False) -> None:
        """Whether the oldest answer is overdue. It may have come while this process stood still: so what has come is
        read before, and whichever is the oldest then counts."""
        self._watch = None
        if self.closed or not self._asked:
            return
        left = self._asked[0][0] + self._call_seconds - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        elif not again:
            self._watch = self._loop.call_later(GRACE_SECONDS, partial(self._look, again=True))
        else:
            self._lose(TimeoutError(f"no answer within {self._call_seconds:g} s"))

    # --- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        if self.closed:
            return
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                self._take(reply)
        except hiredis.ProtocolError as error:
            self._lose(ConnectionError(f"what came is no Redis protocol ({error})"))

    def connection_lost(self, error: Exception | None) -> None:
        self._lose(error or ConnectionError("Redis closed the connection"))

    def _take(self, reply: Any) -> None:
        if self._on_message is not None and isinstance(reply, list) and reply[0] == b"message":
            self._on_message(reply[1], reply[2])
            return
        if not self._asked:
            raise hiredis.ProtocolError("an answer to nothing")
        _, answer = self._asked.popleft()
        if answer.done():
            return  # nobody waits for it any more
        if isinstance(reply, hiredis.ReplyError):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def _lose(self, error: Exception) -> None:
        if not self.closed:
            self.closed = True
            self._transport.abort()
            self._refuse(error)
            self._on_lost(error)

    def _refuse(self, error: Exception) -> None:
        if self._watch is not None:
            self._watch.cancel()
        while self._asked:
            _, answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(error)
