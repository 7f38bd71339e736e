"""One request on one node: sent over HTTP, its events read as they come, given up when the node dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial

import aiohttp
import msgspec

from cluster.errors import ServiceError
from cluster.frames import FrameError, Frames
from cluster.messages import Done, Event, Failed, GenerateRequest, decode_event
from cluster.secret import authorization
from cluster.state import ClusterState
from gateway.connected import cut_short
from gateway.scheduling.placement import Placed

TICK = 1.0
"""Seconds between two looks at whether the node still lives."""
EVENT_LIMIT = 4 << 20
"""Bytes of the largest event: a token with its log probabilities."""
DEADLINE_SLACK = 10.0
"""Nodes end requests at their deadline; the gateway gives up this much later."""
EOF_SECONDS = 0.2


class NodeFailure(Exception):
    """The node did not serve the request; `retryable` when another one may."""

    def __init__(self, error: ServiceError, *, retryable: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.retryable = retryable


class NodeClient:
    def __init__(
        self, session: aiohttp.ClientSession, state: ClusterState, secret: str, *, connect: float, silence: float
    ) -> None:
        self._session = session
        self._state = state
        self._headers = {**authorization(secret), "content-type": "application/msgpack"}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect)
        self._silence = silence

    async def stream(
        self, placed: Placed, request: GenerateRequest, revoked: asyncio.Future[ServiceError]
    ) -> AsyncGenerator[Event, None]:
        """Events up to Done or Failed. Closing the iterator closes the connection, which cancels the request there.

        Raises NodeFailure when the node can't be reached, dies, or says something else; ServiceError when `revoked`
        is set or the deadline has passed by far.
        """
        deadline = time.monotonic() + request.timeout + DEADLINE_SLACK
        given_up = asyncio.ensure_future(self._give_up(placed, deadline, revoked))
        response: aiohttp.ClientResponse | None = None
        try:
            with cut_short(given_up):
                response = await self._post(placed, request)
            if response.status != 200:
                raise _node_failed(f"node {placed.node_id} answered with status {response.status}")
            # From here on each token waits for the node's bytes alone: a task or a timer for it would cost more than
            # all else. Who gives the request up wakes whoever waits for bytes.
            given_up.add_done_callback(partial(_end_stream, response.content))
            frames = Frames(EVENT_LIMIT)
            while chunk := await response.content.readany():
                for event in _decode(frames, chunk, placed.node_id):
                    if isinstance(event, Done | Failed):
                        await _read_end(response)
                        yield event
                        return
                    yield event
            raise _node_failed(f"node {placed.node_id} ended the stream early")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = type(error).__name__
            raise _node_failed(f"the connection to node {placed.node_id} failed ({reason})") from error
        finally:
            given_up.cancel()
            if response is not None:
                response.close()  # nothing happens to a connection that was read to its end: it is back in the pool

    async def _post(self, placed: Placed, request: GenerateRequest) -> aiohttp.ClientResponse:
        body = msgspec.msgpack.encode(request)
        return await self._session.post(
            f"{placed.url}/generate", data=body, headers=self._headers, timeout=self._timeout, allow_redirects=False
        )

    async def _give_up(self, placed: Placed, deadline: float, revoked: asyncio.Future[ServiceError]) -> Exception:
        """Why the request is to end, as soon as it is: revoked, its deadline passed by far, or the node silent."""
        while True:
            await asyncio.wait({revoked}, timeout=TICK)
            if revoked.done():
                return revoked.result()
            if time.monotonic() > deadline:
                return ServiceError("timeout", "the node did not end the request at its deadline")
            if await self._state.silence(placed.node_id, placed.epoch) > self._silence:
                return _node_failed(f"node {placed.node_id} has fallen silent")


def _end_stream(stream: aiohttp.StreamReader, given_up: asyncio.Task[Exception]) -> None:
    if not given_up.cancelled():
        stream.set_exception(given_up.exception() or given_up.result())


def _node_failed(message: str) -> NodeFailure:
    return NodeFailure(ServiceError("node_failed", message), retryable=True)


def _decode(frames: Frames, chunk: bytes, node_id: str) -> list[Event]:
    try:
        return [decode_event(body) for body in frames.feed(chunk)]
    except (FrameError, msgspec.DecodeError) as error:
        raise _node_failed(f"node {node_id} sent something that is not an event ({error})") from error


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Read the end of the reply, so that the connection can be used again; not worth waiting for."""
    try:
        async with asyncio.timeout(EOF_SECONDS):
            await response.content.read()
    except (TimeoutError, aiohttp.ClientError, ServiceError, NodeFailure):
        return  # the caller closes the connection
