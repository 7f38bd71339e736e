"""Messages from each gateway worker to all others, through Redis.

Publishing never blocks. While Redis is unavailable, messages wait and are sent when it is back. A worker that starts
receives only messages published from then on. On the wire a message is identified by its tag, which does not change
between releases.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from cluster.redis_link import RedisAway, RedisLink
from gateway.background import background

MAX_WAITING = 10_000
"""Maximum messages that wait to be sent; beyond that the oldest is dropped."""
MAX_MESSAGES_A_REQUEST = 200
LINK_SECONDS = 1.0
"""Maximum seconds to wait for Redis before sending is tried again."""
ANSWER_SECONDS = 0.5
"""Maximum seconds to wait for other workers' answer to a query."""

M = TypeVar("M")

log = logging.getLogger("gateway")


class Channel(Generic[M]):
    """Channel of one worker. Without a link to Redis there are no other workers."""

    def __init__(self, link: RedisLink | None, name: str, messages: Any, max_waiting: int = MAX_WAITING) -> None:
        """`messages`: union of the message types. At most `max_waiting` messages wait."""
        self._link, self._name = link, name
        self._waiting: deque[M] = deque(maxlen=max_waiting)
        self._has_waiting = asyncio.Event()
        self.on_message: Callable[[M], None] = lambda _: None
        self._queries: dict[str, asyncio.Future[bytes]] = {}
        self._decoder = msgspec.msgpack.Decoder(tuple[str, list[messages]])
        if link is not None:
            link.on_message[name] = self._receive

    @property
    def is_up(self) -> bool:
        """Returns whether messages are sent without delay, because Redis is available."""
        return self._link is not None and self._link.is_up

    def publish(self, message: M) -> None:
        if self._link is not None:
            self._waiting.append(message)
            self._has_waiting.set()

    async def ask(self, question: Callable[[str], M]) -> bytes | None:
        """Publishes a query and returns its answer; None if no worker answers.

        `question` gets a query number and returns the message. The answer repeats this number.
        """
        if not self.is_up:
            return None
        number = secrets.token_hex(8)
        answer = self._queries[number] = asyncio.get_running_loop().create_future()
        try:
            self.publish(question(number))
            await asyncio.wait([answer], timeout=ANSWER_SECONDS)
            return answer.result() if answer.done() else None
        finally:
            del self._queries[number]

    def answer(self, number: str, reply: bytes) -> None:
        """Handles another worker's answer. Ignores it if this worker has no such open query."""
        if (query := self._queries.get(number)) is not None and not query.done():
            query.set_result(reply)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Sends messages as long as the context lasts."""
        return background(*([] if self._link is None else [partial(self._send, self._link)]))

    async def _send(self, link: RedisLink) -> None:
        while True:
            while self._waiting:
                letter = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_MESSAGES_A_REQUEST))]
                while not await self._sent(link, letter):
                    await link.wait_until_up(LINK_SECONDS)
            self._has_waiting.clear()
            await self._has_waiting.wait()

    async def _sent(self, link: RedisLink, letter: list[M]) -> bool:
        try:
            await link.send(self._name, msgspec.msgpack.encode((link.worker, letter)))
        except RedisAway:
            await asyncio.sleep(0.01)  # avoids a busy loop if the link fails repeatedly
            return False
        return True

    def _receive(self, data: bytes) -> None:
        try:
            worker, messages = self._decoder.decode(data)
        except msgspec.DecodeError as error:  # a worker of another release, during a reload
            log.warning("a message of another gateway worker can't be decoded: %s", error)
            return
        if self._link is None or worker == self._link.worker:
            return
        for message in messages:
            self.on_message(message)
