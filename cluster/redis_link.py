"""A gateway worker's link to Redis: it runs scripts with a time limit, receives messages, and reconnects after a
failure.

Users of the link run scripts by `run`. They get RedisAway at once while the link is down. The link's own task
reconnects, lets all users catch up (`on_resume`), and only then marks the link as up.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from cluster.redis_url import shown_url

Value = str | bytes | int | float

CALL_SECONDS = 1.0
"""Maximum seconds to wait for one answer."""
GRACE_SECONDS = 0.02
"""Extra time in which a process that stalled reads the answers that arrived meanwhile."""
CONNECT_SECONDS = 2.0
CONNECTIONS = 4
"""Number of connections of one worker for scripts and published messages. Scripts for places on nodes have a separate
connection."""
MAX_ASKED = 10_000
"""Maximum number of commands of one worker in progress, including those that wait for a connection."""
HEARTBEAT_SECONDS = 0.5
"""Time between two heartbeats. Each one also checks that no message was lost."""
WORKER_SECONDS = 5.0
"""Seconds without a heartbeat after which a worker counts as dead, and its places as free."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""First and longest pause (seconds) before reconnecting."""
STALE_SECONDS = 300.0
"""Seconds after the loss of Redis during which the ages of node records do not grow. Nodes that were alive at the loss
count as alive meanwhile, unless calls to them fail."""
PLACES = ("reserve", "release")
"""Scripts that must not wait for others. They have a separate connection, which also keeps their order."""
LAYOUT = 3
"""Layout version, part of every key and channel. Raise it when a stored key, a script argument or a message changes its
meaning. Workers of releases with different layouts do not share state. The keys of older layouts expire, except for one
counter."""
LOST = (RedisError, OSError, TimeoutError, RuntimeError)
"""Exceptions that redis-py raises when a connection is lost or does not answer. RuntimeError is raised by uvloop for
closed connections."""

log = logging.getLogger("gateway")


class RedisAway(Exception):
    """Redis can't be reached, did not answer in time, or refused the command."""


class OutOfStep(Exception):
    """Messages were lost, so all users of the link have to catch up."""


def prefix_of(secret: str) -> str:
    """Returns the prefix of all keys of one cluster. Clusters that share a Redis server have different secrets, and so
    different prefixes. The braces keep all keys of a cluster in one hash slot."""
    return f"garnish:{LAYOUT}:{{{hashlib.sha256(b'keys' + secret.encode()).hexdigest()[:16]}}}:"


def check_redis(url: str) -> None:
    """Pings the Redis server. Raises RedisAway, with the reason, when it does not answer. Blocks; each network step
    takes CONNECT_SECONDS at most."""
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
    """Link of one worker to Redis. Create it on the event loop that uses it. `clock` returns monotonic seconds;
    `worker` is the name of this process."""

    def __init__(self, url: str, prefix: str, worker: str, clock: Callable[[], float]) -> None:
        self.prefix = prefix
        self.worker = worker
        self.clock = clock
        self._stale_seconds, self._paused = STALE_SECONDS, 0.0
        self.away_since: float | None = clock()
        """Time (by `clock`) at which the link went down; None while it is up."""
        self.workers = 1
        """Number of live workers of all gateways of the cluster, including this one. While Redis is away it is the last
        known number."""
        self._fewer_since: float | None = None
        """Time (by `clock`) since which Redis has counted fewer live workers than `workers`; None: it counts no
        fewer."""
        self.on_message: dict[str, Callable[[bytes], None]] = {}
        """Message handlers by channel. A handler may raise OutOfStep."""
        self.on_resume: list[Callable[[], Awaitable[None]]] = []
        """Callbacks awaited in order before the link is marked as up. They may raise RedisAway."""
        self.on_heartbeat: list[Callable[[int], None]] = []
        """Callbacks run after each heartbeat, with Redis's version of the state of the nodes. They may raise
        OutOfStep."""
        self._url, self._shown = url, shown_url(url)
        self._client, self._places = _client(url, CONNECTIONS), _client(url, 1)
        self._scripts = {
            file.name.removesuffix(".lua"): self._client.register_script(file.read_text())
            for file in (files("cluster") / "redis_scripts").iterdir()
            if file.name.endswith(".lua")
        }
        self._in_flight: set[asyncio.Future[Any]] = set()
        self._last_answer = -math.inf
        """Time (by `clock`) of the last answer."""
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that gets an exception, the reason, when messages or Redis are lost."""
        self._up = asyncio.Event()
        self._ending = False

    def key(self, *parts: str) -> str:
        """Returns the Redis key or channel made of the cluster's prefix and these parts."""
        return self.prefix + ":".join(parts)

    @property
    def is_up(self) -> bool:
        """True: the link is up."""
        return self.away_since is None

    def report_clock(self) -> float:
        """Returns the time by which the age of reports from Redis is measured, in seconds. It stalls while Redis
        is away, since no report could arrive, but for STALE_SECONDS at most."""
        return self.clock() - self._paused - self._pausing()

    def _pausing(self) -> float:
        return 0.0 if self.away_since is None else min(self.clock() - self.away_since, self._stale_seconds)

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """Runs a script and returns its result. The script is completed even if the caller is cancelled. Raises
        RedisAway."""
        self._check_up()
        return await self.catch_up_run(script, keys, args)

    async def send(self, channel: str, message: bytes) -> None:
        """Publishes the message to all workers, including this one. Raises RedisAway."""
        self._check_up()
        await self._ask(self._client.publish(self.key(channel), message))

    def _check_up(self) -> None:
        if not self.is_up:
            raise RedisAway(f"Redis at {self._shown} is away")

    async def wait_until_up(self, seconds: float) -> bool:
        """Waits until the link is up, for `seconds` at most. Returns whether it is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._up.wait()
        return self.is_up

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the link's own task while the context lasts."""
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            self._ending = True
            await _end([task, *self._in_flight])
            await self._close()

    async def catch_up_run(self, script: str, keys: Sequence[str], args: Sequence[Value]) -> Any:
        """Runs a script like `run`, even while the link is not yet up. It is meant for `on_resume` and heartbeats."""
        client = self._places if script in PLACES else self._client
        return await self._ask(self._scripts[script](keys, args, client))

    async def _ask(self, command: Awaitable[Any]) -> Any:
        """Returns the command's result. The command runs in a separate task, which is not cancelled with its caller but
        ends when the link is lost: redis-py discards the connection of a cancelled command. Raises RedisAway, also when
        MAX_ASKED commands are still unanswered."""
        if len(self._in_flight) >= MAX_ASKED:
            command.close()  # type: ignore[attr-defined]  # redis-py's are coroutines
            raise RedisAway(f"Redis at {self._shown} does not keep up: {MAX_ASKED} answers are pending")
        task, link = asyncio.ensure_future(command), self._lost
        self._in_flight.add(task)
        task.add_done_callback(self._answered)
        for seconds in (CALL_SECONDS, GRACE_SECONDS):
            if not task.done():
                await asyncio.wait([task], timeout=seconds)
        try:
            if task.done() and not task.cancelled():
                return task.result()
            raise TimeoutError(f"no answer within {CALL_SECONDS:g} s")
        except LOST as error:
            # Otherwise a new link may already answer, or Redis answers slowly.
            if link is self._lost and not (isinstance(error, TimeoutError) and self._answers):
                self._lose(error)
            raise RedisAway(f"Redis at {self._shown} does not answer ({type(error).__name__})") from error

    @property
    def _answers(self) -> bool:
        return self.clock() - self._last_answer < CALL_SECONDS

    def _answered(self, task: asyncio.Future[Any]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and task.exception() is None:  # the caller may no longer read the exception
            self._last_answer = self.clock()

    def _lose(self, error: BaseException) -> None:
        if self.is_up:
            self.away_since = self.clock()
            self._fewer_since = None
            self._up.clear()
            log.error("Redis is away: the last snapshot is used", extra={"redis": self._shown, "why": str(error)})
        for task in self._in_flight:
            task.cancel()
        self._break(RedisAway(f"Redis at {self._shown} is away"))

    def _break(self, error: Exception) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)
            self._lost.exception()  # marks the exception as retrieved; `_serve` raises it

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._ending:
            try:
                if not self.is_up:
                    await self._renew()
                self._lost = asyncio.get_running_loop().create_future()
                async with self._client.pubsub() as messages:
                    async with asyncio.timeout(CONNECT_SECONDS + CALL_SECONDS):
                        await self._subscribe(messages)
                    await self._catch_up()
                    pause = FIRST_PAUSE_S
                    await self._serve(messages)
            except OutOfStep as error:
                log.info("catching up with Redis", extra={"redis": self._shown, "why": str(error)})
            except (RedisAway, *LOST) as error:
                self._lose(error)
            except Exception as error:  # a worker must not continue without messages and heartbeats
                log.exception("a message of Redis can't be used", extra={"redis": self._shown})
                self._lose(error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _renew(self) -> None:
        """Replaces all connections: redis-py's pool may lose one for ever when its command is cancelled."""
        await _end(list(self._in_flight))
        await self._close()
        self._client, self._places = _client(self._url, CONNECTIONS), _client(self._url, 1)

    async def _close(self) -> None:
        for client in (self._client, self._places):
            await client.connection_pool.disconnect()

    async def _subscribe(self, messages: PubSub) -> None:
        """Subscribes to all channels. From then on no message is missed: messages that arrive before all users have
        caught up wait in the connection. Raises OutOfStep."""
        channels = [self.key(channel) for channel in self.on_message]
        await messages.subscribe(*channels)
        for _ in channels:
            confirmed = await messages.get_message(timeout=CALL_SECONDS)
            if confirmed is None or confirmed["type"] != "subscribe":
                raise OutOfStep("Redis did not confirm a subscription, or sent a message before the last one")

    async def _catch_up(self) -> None:
        await self._heartbeat()
        for resume in self.on_resume:
            await resume()
        if not self.is_up:
            self._paused += self._pausing()
            self.away_since = None
            self._up.set()
            log.info("Redis is back", extra={"redis": self._shown})

    async def _serve(self, messages: PubSub) -> None:
        """Sends heartbeats and handles messages until the link is lost. Raises the reason for the loss."""
        tasks = [asyncio.create_task(work) for work in (self._heartbeats(), self._hear(messages))]
        try:
            await asyncio.wait([*tasks, self._lost], return_when=asyncio.FIRST_COMPLETED)
            for ended in (*tasks, self._lost):
                if ended.done():
                    ended.result()
        finally:
            await _end(tasks)

    async def _hear(self, messages: PubSub) -> None:
        """Passes messages to their handlers for ever. Raises OutOfStep when the connection is lost. Redis itself may
        still answer then, for instance when it has closed a connection whose messages piled up."""
        handlers = {self.key(channel).encode(): handle for channel, handle in self.on_message.items()}
        incoming = messages.listen()
        while True:
            try:
                message = await anext(incoming)
            except (*LOST, StopAsyncIteration) as error:  # redis-py ends the iteration of a closed connection
                raise OutOfStep(f"the connection of the messages was lost: {error}") from error
            if message["type"] == "message":
                handlers[message["channel"]](message["data"])
                await asyncio.sleep(0)  # buffered messages come without a pause: lets other tasks run

    async def _heartbeats(self) -> None:
        while True:
            before = self.clock()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            try:
                version = await self._heartbeat()
            except RedisAway:
                if not self._answers:
                    raise
                continue  # Redis is slow, not away
            if self.clock() - before > WORKER_SECONDS / 2:
                raise RedisAway("this worker was held up, and may count as dead")
            for check in self.on_heartbeat:
                check(version)

    async def _heartbeat(self) -> int:
        keys = [self.key("workers"), self.key("version")]
        silent = int(WORKER_SECONDS * 1000)
        version, workers = await self.catch_up_run("heartbeat", keys, [self.worker, 60 * silent, silent])
        self._count_workers(int(workers))
        return int(version)

    def _count_workers(self, count: int) -> None:
        """Records the number of workers that Redis counts. A smaller number is accepted only after WORKER_SECONDS: in
        an emptied Redis the workers reappear one by one."""
        if count >= self.workers:
            self.workers, self._fewer_since = count, None
        elif self._fewer_since is None:
            self._fewer_since = self.clock()
        elif self.clock() - self._fewer_since >= WORKER_SECONDS:
            self.workers, self._fewer_since = count, None


def _client(url: str, connections: int) -> Redis:
    """Returns a client that never retries: the link decides what is done after a failure."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=None,
        socket_timeout=None,  # the link limits the complete command itself
        socket_connect_timeout=CONNECT_SECONDS,
        retry=AsyncRetry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis.from_pool(pool)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels the tasks repeatedly until all are done: a single cancellation that coincides with an answer or a time
    limit inside the client is lost. Waits for all of them even if the caller is cancelled."""
    cancelled = False
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        try:
            await asyncio.wait(tasks, timeout=HEARTBEAT_SECONDS)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
