"""A gateway worker's connection to Redis: scripts with a time limit, messages as they come, and what is done when it
breaks.

Whoever shares something through Redis runs scripts by `run`, and gets RedisAway at once while the link is down. A task
of the link's own connects again, lets everyone catch up (`on_resume`) and only then calls the link up.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as BlockingRetry

from cluster.redis_url import shown_url

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
CONNECTIONS = 64
SCRIPTS = ("publish", "reserve", "release", "snapshot", "beat", "take", "settle", "recount", "lease")

log = logging.getLogger("gateway")

Value = str | bytes | int | float


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
            retry=BlockingRetry(NoBackoff(), 0),
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
        self.on_message: dict[str, Callable[[bytes], None]] = {}
        """By channel. May raise OutOfStep."""
        self.on_resume: list[Callable[[], Awaitable[None]]] = []
        """Run in order before the link is called up. May raise RedisAway."""
        self.on_beat: list[Callable[[int], None]] = []
        """Given the version of the picture of the nodes, as Redis has it. May raise OutOfStep."""
        self._shown = shown_url(url)
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=CONNECT_SECONDS,
            socket_timeout=CALL_SECONDS,
            socket_connect_timeout=CONNECT_SECONDS,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._client = Redis(connection_pool=pool)
        folder = files("cluster") / "redis_scripts"
        self._scripts = {name: self._client.register_script((folder / f"{name}.lua").read_text()) for name in SCRIPTS}
        self._lost = asyncio.Event()
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

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """What the script returns. Raises RedisAway, at once while the link is down."""
        if not self.is_up:
            raise RedisAway(f"Redis at {self._shown} is away")
        return await self._run(script, keys, args)

    async def send(self, channel: str, message: bytes) -> None:
        """To all workers, this one too. Raises RedisAway."""
        if not self.is_up:
            raise RedisAway(f"Redis at {self._shown} is away")
        await self._guarded(self._client.publish(self.key(channel), message))

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
            with suppress(RedisError, OSError):
                await self._client.connection_pool.aclose()

    async def catch_up_run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """As `run`, for `on_resume`, while the link is not called up yet."""
        return await self._run(script, keys, args)

    async def _run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        return await self._guarded(self._scripts[script](keys=list(keys), args=list(args)))

    async def _guarded(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(CONNECT_SECONDS + CALL_SECONDS):
                return await call
        except (RedisError, OSError, TimeoutError) as error:
            self._lose(error)
            raise RedisAway(f"Redis at {self._shown} does not answer ({type(error).__name__})") from error

    def _lose(self, error: BaseException) -> None:
        if self.is_up:
            self.away_since = self.clock()
            self._up.clear()
            log.error("Redis is away: going on from the last picture", extra={"redis": self._shown, "why": str(error)})
        self._lost.set()

    async def _keep(self) -> None:
        pause = FIRST_PAUSE
        while not self._ending:
            try:
                async with self._client.pubsub() as messages:
                    await self._subscribe(messages)
                    pause = FIRST_PAUSE
                    await self._serve(messages)
            except OutOfStep as error:
                log.info("catching up with Redis", extra={"redis": self._shown, "why": str(error)})
            except (RedisAway, RedisError, OSError, TimeoutError) as error:
                self._lose(error)
            except Exception as error:  # whatever it was, this worker must not go on unheard of and unheard
                log.exception("what came from Redis can't be used", extra={"redis": self._shown})
                self._lose(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _subscribe(self, messages: PubSub) -> None:
        self._lost.clear()
        channels = [self.key(channel) for channel in self.on_message]
        async with asyncio.timeout(CONNECT_SECONDS + CALL_SECONDS):
            await messages.subscribe(*channels)
            for _ in channels:  # from here on nothing is missed
                await messages.get_message(timeout=None)
        await self._beat()
        for resume in self.on_resume:
            await resume()
        if not self.is_up:
            self._paused += self._pausing()
            self.away_since = None
            self._up.set()
            log.info("Redis is there", extra={"redis": self._shown})

    async def _serve(self, messages: PubSub) -> None:
        """Until the link is lost: raises why."""
        tasks = [asyncio.create_task(work) for work in (self._listen(messages), self._beats(), self._wait_lost())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _end(tasks)

    async def _listen(self, messages: PubSub) -> None:
        handlers = {self.key(channel).encode(): handle for channel, handle in self.on_message.items()}
        # Looks up now and then: a cancellation may be lost inside the client again and again.
        while not self._ending:
            message = await messages.get_message(ignore_subscribe_messages=True, timeout=BEAT_SECONDS)
            if message is not None and message["type"] == "message":
                handlers[message["channel"]](message["data"])

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
        return int(await self._run("beat", keys, [self.worker, int(60 * WORKER_SECONDS * 1000)]))

    async def _wait_lost(self) -> None:
        await self._lost.wait()
        raise RedisAway(f"Redis at {self._shown} is away")


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
