"""A gateway worker's connection to Redis: scripts with a time limit, messages as they come, and what is done when it
breaks.

Whoever shares something through Redis runs scripts by `run`, and gets RedisAway at once while the link is down. A task
of the link's own connects again, lets everyone catch up (`on_resume`) and only then calls the link up.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import redis
from hiredis import HiredisError, ReplyError
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from cluster.redis_url import shown_url
from cluster.redis_wire import RedisWire, Value, WireFull, open_wire

CALL_SECONDS = 1.0
"""Longest wait for one answer."""
CONNECT_SECONDS = 2.0
BEAT_SECONDS = 0.5
"""Between two signs of life, each of which also checks that no message was lost."""
WORKER_SECONDS = 5.0
"""A worker that was silent for this long has ended, and what it had taken is free."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds before a lost link is tried again."""
STALE_SECONDS = 300.0
"""For so long after Redis went away nodes that were alive then count as alive, unless they fail."""
SCRIPTS = ("publish", "reserve", "release", "snapshot", "beat", "take", "settle", "recount", "lease")

UNKNOWN_SCRIPT = object()
"""Instead of its answer."""

log = logging.getLogger("gateway")


class RedisAway(Exception):
    """Redis can't be reached, or did not answer in time, or refused."""


class OutOfStep(Exception):
    """Messages were lost: everyone has to catch up."""


def prefix_of(secret: str) -> str:
    """What all keys of one cluster begin with: clusters that share a server have different secrets. The braces keep
    them on one shard."""
    return f"garnish:{{{hashlib.sha256(b'keys' + secret.encode()).hexdigest()[:16]}}}:"


def check_redis(url: str) -> None:
    """Raises RedisAway, with the reason, when no server answers there now. Blocks for CONNECT_SECONDS at most."""
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=CONNECT_SECONDS,
            socket_connect_timeout=CONNECT_SECONDS,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        with client:
            client.ping()
    except (RedisError, OSError) as error:
        raise RedisAway(f"Redis at {shown_url(url)} does not answer: {error}") from error


class RedisLink:
    """Made on the event loop that uses it. `clock` is monotonic seconds; `worker` names this process."""

    def __init__(
        self,
        url: str,
        prefix: str,
        worker: str,
        clock: Callable[[], float],
        *,
        stale_seconds: float = STALE_SECONDS,
    ) -> None:
        self.prefix = prefix
        self.worker = worker
        self.clock = clock
        self._stale_seconds, self._paused = stale_seconds, 0.0
        self.away_since: float | None = clock()
        """By the clock; None while the link is up."""
        self.workers = 1
        """That live, this one included, of all gateways of the cluster: as last known while Redis is away."""
        self._fewer_since: float | None = None
        """By the clock: since when there have been fewer than `workers`."""
        self.on_message: dict[str, Callable[[bytes], None]] = {}
        """By channel. May raise OutOfStep."""
        self.on_resume: list[Callable[[], Awaitable[None]]] = []
        """Run in order before the link is called up. May raise RedisAway."""
        self.on_beat: list[Callable[[int], None]] = []
        """Given the version of the picture of the nodes, as Redis has it. May raise OutOfStep."""
        self._url, self._shown = url, shown_url(url)
        folder = files("cluster") / "redis_scripts"
        self._scripts = {name: (folder / f"{name}.lua").read_bytes() for name in SCRIPTS}
        self._hashes = {name: _sha1(text) for name, text in self._scripts.items()}
        self._wire: RedisWire | None = None
        """What is asked goes over this one; messages come over another, which is made anew when one was lost."""
        self._handlers: dict[bytes, Callable[[bytes], None]] = {}
        self._early: list[tuple[bytes, bytes]] | None = None
        """Messages that came before everyone had caught up; None from then on."""
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Has an exception when messages or Redis are lost: why."""
        self._up = asyncio.Event()
        self._ending = False

    def key(self, *parts: str) -> str:
        return self.prefix + ":".join(parts)

    @property
    def is_up(self) -> bool:
        return self.away_since is None

    def aged(self) -> float:
        """The time by which news from Redis grow old: it stands still while none could have come, STALE_SECONDS at
        most."""
        return self.clock() - self._paused - self._pausing()

    def _pausing(self) -> float:
        return 0.0 if self.away_since is None else min(self.clock() - self.away_since, self._stale_seconds)

    def run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Coroutine[Any, Any, Any]:
        """What the script returns. It is asked for at once, so its caller may do something else before it awaits the
        answer, as it must. Raises RedisAway, then or now."""
        if not self.is_up:
            raise RedisAway(f"Redis at {self._shown} is away")
        return self._run(script, keys, args)

    async def send(self, channel: str, message: bytes) -> None:
        """To all workers, this one too. Raises RedisAway."""
        if not self.is_up:
            raise RedisAway(f"Redis at {self._shown} is away")
        await self._ask("PUBLISH", self.key(channel), message)

    async def wait_until_up(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._up.wait()
        return self.is_up

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The link's own task lives as long as the context."""
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            self._ending = True
            await _end([task])
            if self._wire is not None:
                await self._wire.close()

    def catch_up_run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Coroutine[Any, Any, Any]:
        """As `run`, for `on_resume`, while the link is not called up yet."""
        return self._run(script, keys, args)

    def _run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Coroutine[Any, Any, Any]:
        asked = self._ask("EVALSHA", self._hashes[script], len(keys), *keys, *args)
        return self._ran(asked, script, keys, args)

    async def _ran(
        self, asked: Coroutine[Any, Any, Any], script: str, keys: Sequence[str], args: Sequence[Value]
    ) -> Any:
        found = await asked
        if found is not UNKNOWN_SCRIPT:
            return found
        return await self._ask("EVAL", self._scripts[script], len(keys), *keys, *args)  # Redis knows it from then on

    def _ask(self, *command: Value) -> Coroutine[Any, Any, Any]:
        """Sent at once, as by `run`."""
        wire = self._wire
        if wire is None:
            raise self._away(None, ConnectionError("there is no connection"))
        try:
            return self._answer(wire, wire.ask(*command))
        except WireFull as error:
            raise RedisAway(f"Redis at {self._shown} does not keep up: {error}") from error
        except OSError as error:
            raise self._away(wire, error) from error

    async def _answer(self, wire: RedisWire, asked: asyncio.Future[Any]) -> Any:
        try:
            return await asked
        except (HiredisError, OSError, TimeoutError) as error:
            if isinstance(error, ReplyError) and str(error).startswith("NOSCRIPT"):
                return UNKNOWN_SCRIPT
            raise self._away(wire, error) from error

    def _away(self, wire: RedisWire | None, error: Exception) -> RedisAway:
        """After `error` on this wire."""
        if wire is self._wire:  # else there is another by now, which may well answer
            self._lose(error)
        return RedisAway(f"Redis at {self._shown} does not answer ({type(error).__name__})")

    def _lose(self, error: BaseException) -> None:
        if self.is_up:
            self.away_since = self.clock()
            self._fewer_since = None
            self._up.clear()
            log.error("Redis is away: going on from the last picture", extra={"redis": self._shown, "why": str(error)})
        if self._wire is not None:
            self._wire.abort()
        self._break(RedisAway(f"Redis at {self._shown} is away"))

    def _lose_messages(self, error: Exception) -> None:
        """Redis may well answer, as it does when it ends a connection whose messages pile up."""
        self._break(OutOfStep(f"the connection of the messages was lost: {error}"))

    def _break(self, error: Exception) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # it is looked at when somebody serves

    async def _keep(self) -> None:
        pause = FIRST_PAUSE
        while not self._ending:
            try:
                async with self._messages() as messages:
                    await self._subscribe(messages)
                    pause = FIRST_PAUSE
                    await self._serve()
            except OutOfStep as error:
                log.info("catching up with Redis", extra={"redis": self._shown, "why": str(error)})
            except (RedisAway, RedisError, OSError, TimeoutError) as error:
                self._lose(error)
            except Exception as error:  # whatever it was, this worker must not go on unheard of and unheard
                log.exception("what came from Redis can't be used", extra={"redis": self._shown})
                self._lose(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    @asynccontextmanager
    async def _messages(self) -> AsyncIterator[RedisWire]:
        """Both connections; that of the messages is closed with the context."""
        self._lost = asyncio.get_running_loop().create_future()
        self._early = []
        self._handlers = {self.key(channel).encode(): handle for channel, handle in self.on_message.items()}
        if self._wire is None or self._wire.closed:
            if self._wire is not None:
                await self._wire.close()
            self._wire = await self._open(self._lose)
        messages = await self._open(self._lose_messages, self._heard)
        try:
            yield messages
        finally:
            await messages.close()

    async def _open(
        self, on_lost: Callable[[Exception], None], on_message: Callable[[bytes, bytes], None] | None = None
    ) -> RedisWire:
        return await open_wire(
            self._url,
            connect_seconds=CONNECT_SECONDS,
            call_seconds=CALL_SECONDS,
            on_lost=on_lost,
            on_message=on_message,
        )

    async def _subscribe(self, messages: RedisWire) -> None:
        for channel in self._handlers:  # from its answer on nothing is missed
            await messages.ask("SUBSCRIBE", channel)
        await self._beat()
        for resume in self.on_resume:
            await resume()
        if not self.is_up:
            self._paused += self._pausing()
            self.away_since = None
            self._up.set()
            log.info("Redis is there", extra={"redis": self._shown})

    async def _serve(self) -> None:
        """Until the link is lost: raises why."""
        early, self._early = self._early or [], None
        for channel, data in early:
            self._heard(channel, data)
        beats = asyncio.create_task(self._beats())
        try:
            await asyncio.wait([beats, self._lost], return_when=asyncio.FIRST_COMPLETED)
            for ended in (beats, self._lost):
                if ended.done():
                    ended.result()
        finally:
            await _end([beats])

    def _heard(self, channel: bytes, data: bytes) -> None:
        if self._early is not None:
            self._early.append((channel, data))
        elif not self._lost.done():  # after a message that could not be used, the next ones can't be either
            try:
                self._handlers[channel](data)
            except Exception as error:
                self._break(error)

    async def _beats(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(BEAT_SECONDS)
            version = await self._beat()
            if self.clock() - before > WORKER_SECONDS / 2:
                raise RedisAway("this worker was held up, and may count as dead")
            for told in self.on_beat:
                told(version)

    async def _beat(self) -> int:
        keys = [self.key("workers"), self.key("version")]
        silent = int(WORKER_SECONDS * 1000)
        version, workers = await self._run("beat", keys, [self.worker, 60 * silent, silent])
        self._count_workers(int(workers))
        return int(version)

    def _count_workers(self, count: int) -> None:
        """Fewer are believed in after a while: a Redis that was emptied hears of one worker after the other."""
        if count >= self.workers:
            self.workers, self._fewer_since = count, None
        elif self._fewer_since is None:
            self._fewer_since = self.clock()
        elif self.clock() - self._fewer_since >= WORKER_SECONDS:
            self.workers, self._fewer_since = count, None


def _sha1(script: bytes) -> str:
    """By which Redis knows it."""
    return hashlib.sha1(script, usedforsecurity=False).hexdigest()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel until it is done: a cancellation that meets an answer or a time limit inside the client is lost. Nor does
    a cancellation of the caller leave any of them behind."""
    cancelled = False
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks, timeout=BEAT_SECONDS)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
