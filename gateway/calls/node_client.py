"""Sends a request to one node over HTTP and reads its events, until the request ends or the node dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial

import aiohttp
import msgspec

from cluster.descriptors import is_out_of_descriptors
from cluster.errors import ServiceError
from cluster.frames import FrameError, Frames
from cluster.messages import Done, Event, Failed, GenerateRequest, Started, Token, decode_event
from cluster.secret import authorization
from gateway.calls.breaker import Breakers
from gateway.calls.node_watch import NodeFailure, NodeWatches, node_failed
from gateway.http.connected import cut_short
from gateway.scheduling.route import RETRY_AFTER, Route

ANSWER_SECONDS = 5.0
"""Seconds to wait for the status line of a node's reply. The node sends it before it queues the request."""
MAX_EVENT_BYTES = 4 << 20
DEADLINE_SLACK = 10.0
"""Seconds from a request's deadline until the gateway stops waiting for its node. The node itself should end the
request at the deadline."""
EOF_SECONDS = 0.2


class NodeClient:
    """Client that streams from nodes. `connect`: timeout of a new connection in seconds."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        secret: str,
        watches: NodeWatches,
        *,
        connect: float,
        breakers: Breakers,
    ) -> None:
        self._breakers = breakers
        self._session = session
        self._headers = {**authorization(secret), "content-type": "application/msgpack"}
        # No total timeout: a stream may be silent while its node lives, and the watch ends it otherwise.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect)
        self._watches = watches

    async def stream(
        self, route: Route, request: GenerateRequest, interrupted: asyncio.Future[Exception]
    ) -> AsyncGenerator[Event, None]:
        """Yields events up to Done or Failed. Closing the generator closes the connection, which cancels the request.

        Raises NodeFailure if the node can't be reached, dies, or sends something invalid; the result of `interrupted`;
        ServiceError if the deadline has passed by DEADLINE_SLACK, or if this process has no file descriptors left.
        """
        breakers, node = self._breakers, (route.node_id, route.epoch)
        probe = breakers.begin(*node)
        response: aiohttp.ClientResponse | None = None
        try:
            with self._watches.watched(route, time.monotonic() + request.timeout + DEADLINE_SLACK) as watched:
                interrupted.add_done_callback(watched.interrupt)
                try:
                    with cut_short(watched.given_up):
                        response = await self._post(route, request)
                    if response.status != 200:
                        raise node_failed(f"node {route.node_id} answered with status {response.status}")
                    breakers.undecided(*node, probe)
                    content, frames = response.content, Frames(MAX_EVENT_BYTES)
                    watched.given_up.add_done_callback(partial(_end_reading, content))
                    while chunk := await content.readany():
                        watched.record_bytes()
                        for event in _decode(frames, chunk, route.node_id):
                            kind = type(event)
                            if kind is not Started:
                                breakers.answered(*node)
                            if kind is Token:
                                watched.has_token = True
                            elif kind is Done or kind is Failed:
                                await _read_end(content)
                                yield event
                                return
                            yield event
                    raise node_failed(f"node {route.node_id} ended the stream early")
                except (aiohttp.ClientError, TimeoutError, OSError, UnicodeError) as error:  # UnicodeError: of its name
                    if isinstance(error, OSError) and is_out_of_descriptors(error):
                        why = "this gateway has no room for more connections now"
                        raise ServiceError("unavailable", why, retry_after=RETRY_AFTER) from error
                    reason = type(error).__name__
                    raise node_failed(f"the connection to node {route.node_id} failed ({reason})") from error
                finally:
                    interrupted.remove_done_callback(watched.interrupt)
                    if response is not None:
                        response.close()  # the connection is reused if this response was read to its end
        except NodeFailure:
            breakers.failed(*node, probe)
            raise
        finally:
            breakers.undecided(*node, probe)

    async def _post(self, route: Route, request: GenerateRequest) -> aiohttp.ClientResponse:
        body, url = msgspec.msgpack.encode(request), route.url.rstrip("/") + "/generate"
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self._session.post(
                url, data=body, headers=self._headers, timeout=self._timeout, allow_redirects=False
            )


def _end_reading(content: aiohttp.StreamReader, given_up: asyncio.Future[Exception]) -> None:
    """Makes the stream's reader raise the reason for which the stream was given up. `given_up`: future whose result is
    that reason."""
    content.set_exception(given_up.result())


def _decode(frames: Frames, chunk: bytes, node_id: str) -> list[Event]:
    try:
        return [decode_event(body) for body in frames.feed(chunk)]
    except (FrameError, msgspec.DecodeError) as error:
        raise node_failed(f"node {node_id} sent something that is not an event ({error})") from error


async def _read_end(content: aiohttp.StreamReader) -> None:
    """Reads the end of the reply, so that the connection can be reused. Gives up after EOF_SECONDS."""
    with suppress(Exception):  # any error, even if the request was given up, because the caller closes the connection
        async with asyncio.timeout(EOF_SECONDS):
            while await content.readany():
                pass
