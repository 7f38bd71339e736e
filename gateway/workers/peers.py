"""What the gateway's workers publish to and ask each other: changes of functions and tenants, calls that are to end,
and which adapters were called.

Nothing waits for it. While Redis is away the messages wait, and go out when it is back. A worker that starts hears only
what is published from then on. On the wire a message is named by its tag, which stays the same from release to release.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from cluster.redis_link import RedisAway, RedisLink
from gateway.background import background

CHANNEL = "peers"
MAX_WAITING = 10_000
"""Messages; the oldest is forgotten."""
MAX_TOGETHER = 200
"""Messages that are sent as one."""
LINK_SECONDS = 1.0
"""Longest wait for Redis, after which it is tried all the same."""
ANSWER_SECONDS = 0.5
"""Longest wait for the others' answer to a question."""

log = logging.getLogger("gateway")


class FunctionChanged(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """Nothing that was known of the function is valid any more."""

    tenant: str
    function: str


class TenantChanged(msgspec.Struct, frozen=True, array_like=True, tag="tenant"):
    tenant: str


class CallsRevoked(msgspec.Struct, frozen=True, array_like=True, tag="revoked"):
    """Generations of the function are to end now."""

    tenant: str
    function: str
    reason: str
    id: str = ""
    """By which whoever hears it from the registry, too, knows it; empty: an earlier release published it."""


class DigestCalled(msgspec.Struct, frozen=True, array_like=True, tag="called"):
    """The tenant had this adapter run, for the first time as far as the publishing worker knows."""

    tenant: str
    digest: str


class ExplanationAsked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """How was this call placed? `tenant`: whose it must be; None: anybody's."""

    number: str
    call: str
    tenant: str | None


class ExplanationAnswered(msgspec.Struct, frozen=True, array_like=True, tag="answered"):
    number: str
    reply: bytes
    """JSON of gateway.calls.explanations.ExplainReply."""


Message = FunctionChanged | TenantChanged | CallsRevoked | DigestCalled | ExplanationAsked | ExplanationAnswered


class _Letter(msgspec.Struct, frozen=True, array_like=True):
    worker: str
    messages: list[Message]


class Peers:
    """Of one worker. Without a link there are no others."""

    def __init__(self, link: RedisLink | None) -> None:
        self._link = link
        self._waiting: deque[Message] = deque(maxlen=MAX_WAITING)
        self._some = asyncio.Event()
        self.on_message: Callable[[Message], None] = _ignore
        self._asked: dict[str, asyncio.Future[bytes]] = {}
        self._decoder = msgspec.msgpack.Decoder(_Letter)
        if link is not None:
            link.on_message[CHANNEL] = self._heard

    def publish(self, message: Message) -> None:
        if self._link is not None:
            self._waiting.append(message)
            self._some.set()

    async def ask(self, call: str, tenant: str | None) -> bytes | None:
        """The answer of whoever knows the call; None when nobody says that it does."""
        if self._link is None or not self._link.is_up:
            return None
        number = secrets.token_hex(8)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self.publish(ExplanationAsked(number, call, tenant))
            await asyncio.wait([answer], timeout=ANSWER_SECONDS)
            return answer.result() if answer.done() else None
        finally:
            del self._asked[number]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Messages go out as long as the context lasts."""
        if self._link is None:
            yield
            return
        async with background(partial(self._send, self._link)):
            yield

    async def _send(self, link: RedisLink) -> None:
        while True:
            while self._waiting:
                letter = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_TOGETHER))]
                while not await self._sent(link, letter):
                    await link.wait_until_up(LINK_SECONDS)
            self._some.clear()
            await self._some.wait()

    async def _sent(self, link: RedisLink, letter: list[Message]) -> bool:
        try:
            await link.send(CHANNEL, msgspec.msgpack.encode(_Letter(link.worker, letter)))
        except RedisAway:
            await asyncio.sleep(0.01)  # a link that comes and goes must not make this a busy loop
            return False
        return True

    def _heard(self, data: bytes) -> None:
        try:
            letter = self._decoder.decode(data)
        except msgspec.DecodeError as error:  # a worker of another version, in the middle of a reload
            log.warning("a message of another gateway worker is not understood: %s", error)
            return
        if self._link is None or letter.worker == self._link.worker:
            return
        for message in letter.messages:
            if not isinstance(message, ExplanationAnswered):
                self.on_message(message)
            elif (answer := self._asked.get(message.number)) is not None and not answer.done():
                answer.set_result(message.reply)


def _ignore(_: Message) -> None:
    return None
