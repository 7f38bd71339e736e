"""One request on one node: sent over HTTP, its events read as they come, given up when the node dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import aiohttp
import msgspec

from cluster.frames import FrameError, Frames
from cluster.messages import Done, Event, Failed, GenerateRequest, Started, Token, decode_event
from cluster.secret import authorization
from gateway.calls.breaker import Breakers, Probe
from gateway.calls.node_watch import NodeFailure, NodeWatches, WatchedStream, node_failed
from gateway.http.connected import cut_short
from gateway.scheduling.placement import Placed

ANSWER_SECONDS = 5.0
"""Within which a node says that it has the request; it does so before it queues it."""
EVENT_LIMIT = 4 << 20
"""Bytes of the largest event: a token with its log probabilities."""
DEADLINE_SLACK = 10.0
"""Nodes end requests at their deadline; the gateway gives up this much later."""
EOF_SECONDS = 0.2


class NodeClient:
    """`connect`: seconds that a connection to a node may take to be made."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        secret: str,
        watches: NodeWatches,
        *,
        connect: float,
        breakers: Breakers,
    ) -> None:
        self.breakers = breakers
        self._session = session
        self._headers = {**authorization(secret), "content-type": "application/msgpack"}
        # A stream may be silent for as long as its node lives: the watch ends it.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect)
        self._watches = watches

    async def stream(
        self, placed: Placed, request: GenerateRequest, interrupted: asyncio.Future[Exception]
    ) -> AsyncGenerator[Event, None]:
        """Events up to Done or Failed. Closing the iterator closes the connection, which cancels the request there.

        Raises NodeFailure when the node can't be reached, dies, or says something else; what `interrupted` gets; and
        ServiceError when the deadline has passed by far.
        """
        node = placed.node_id, placed.epoch
        probe = self.breakers.begin(*node)
        try:
            async with aclosing(self._events(placed, request, interrupted, probe)) as events:
                async for event in events:
                    if not isinstance(event, Started):
                        self.breakers.answered(*node)
                    yield event
        except NodeFailure:
            self.breakers.failed(*node, probe)
            raise
        finally:
            self.breakers.undecided(*node, probe)

    async def _events(
        self, placed: Placed, request: GenerateRequest, interrupted: asyncio.Future[Exception], probe: Probe | None
    ) -> AsyncGenerator[Event, None]:
        response: aiohttp.ClientResponse | None = None
        with self._watches.watched(placed, time.monotonic() + request.timeout + DEADLINE_SLACK) as stream:

            def interrupt(reason: asyncio.Future[Exception]) -> None:
                if not reason.cancelled():
                    stream.give_up(reason.result())

            interrupted.add_done_callback(interrupt)
            try:
                with cut_short(stream.given_up):
                    response = await self._answered(placed, request)
                async with aclosing(self._read(placed, response, stream, probe)) as events:
                    async for event in events:
                        yield event
            except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:  # UnicodeError: of its name
                reason = type(error).__name__
                raise node_failed(f"the connection to node {placed.node_id} failed ({reason})") from error
            finally:
                interrupted.remove_done_callback(interrupt)
                if response is not None:
                    response.close()  # kept for the next request if this one's answer was read to its end

    async def _answered(self, placed: Placed, request: GenerateRequest) -> aiohttp.ClientResponse:
        body, url = msgspec.msgpack.encode(request), placed.url.rstrip("/") + "/generate"
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self._session.post(
                url, data=body, headers=self._headers, timeout=self._timeout, allow_redirects=False
            )

    async def _read(
        self, placed: Placed, response: aiohttp.ClientResponse, stream: WatchedStream, probe: Probe | None
    ) -> AsyncGenerator[Event, None]:
        if response.status != 200:
            raise node_failed(f"node {placed.node_id} answered with status {response.status}")
        self.breakers.undecided(placed.node_id, placed.epoch, probe)
        frames = Frames(EVENT_LIMIT)
        while chunk := await _next_bytes(response, stream):
            for event in _decode(frames, chunk, placed.node_id):
                stream.has_token = stream.has_token or isinstance(event, Token)
                if isinstance(event, Done | Failed):
                    await _read_end(response)
                    yield event
                    return
                yield event
        raise node_failed(f"node {placed.node_id} ended the stream early")


async def _next_bytes(response: aiohttp.ClientResponse, stream: WatchedStream) -> bytes:
    """Returns the next bytes of the stream; none at its end. Raises why the stream is given up."""
    if stream.given_up.done():
        raise stream.given_up.result()
    with cut_short(stream.given_up):
        chunk = await response.content.readany()
    stream.note_bytes()
    return chunk


def _decode(frames: Frames, chunk: bytes, node_id: str) -> list[Event]:
    try:
        return [decode_event(body) for body in frames.feed(chunk)]
    except (FrameError, msgspec.DecodeError) as error:
        raise node_failed(f"node {node_id} sent something that is not an event ({error})") from error


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Read the end of the reply, so that the connection can be used again; not worth waiting for."""
    with suppress(aiohttp.ClientError, TimeoutError, OSError):  # the caller closes the connection
        async with asyncio.timeout(EOF_SECONDS):
            while await response.content.readany():
                pass
