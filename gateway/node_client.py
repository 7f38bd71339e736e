"""One request on one node: sent over HTTP, its events read as they come, given up when the node dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec

from cluster.errors import ServiceError
from cluster.frames import FrameError, Frames
from cluster.messages import Done, Event, Failed, GenerateRequest, Started, Token, decode_event
from cluster.state import ClusterState
from gateway.breaker import FIRST_PAUSE, Breakers, CircuitOpen, Probe
from gateway.connected import cut_short
from gateway.node_http import NodeConnections, NodeResponse
from gateway.scheduling.placement import Placed, all_full

TICK = 1.0
"""Seconds between two looks at whether the node still lives."""
FIRST_TICK = 0.25
"""The same until the first token, while another node can still take over."""
ANSWER_SECONDS = 5.0
"""Within which a node says that it has the request; it does so before it queues it."""
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


@dataclass
class _Watch:
    """Over one request."""

    placed: Placed
    deadline: float
    """Monotonic seconds."""
    revoked: asyncio.Future[ServiceError]
    has_token: bool = False
    over: bool = False
    """Its connection may be another request's by now."""


class NodeClient:
    """`silence`: seconds without a record after which a node is taken for dead; `first_silence`: the same for a request
    without a token, when there are other nodes, which can take it over."""

    def __init__(
        self,
        connections: NodeConnections,
        state: ClusterState,
        *,
        silence: float,
        first_silence: float,
        breakers: Breakers,
    ) -> None:
        self.breakers = breakers
        self._connections = connections
        self._state = state
        self._silence = silence
        self._first_silence = min(first_silence, silence)

    async def stream(
        self, placed: Placed, request: GenerateRequest, revoked: asyncio.Future[ServiceError]
    ) -> AsyncGenerator[Event, None]:
        """Events up to Done or Failed. Closing the iterator closes the connection, which cancels the request there.

        Raises NodeFailure when the node can't be reached, dies, or says something else; ServiceError when `revoked`
        is set, the deadline has passed by far, or the place turns out to be another's: before any event.
        """
        node = placed.node_id, placed.epoch
        try:
            probe = self.breakers.begin(*node)
        except CircuitOpen:
            raise _circuit_open(placed.node_id) from None
        try:
            async with aclosing(self._events(placed, request, revoked, probe)) as events:
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
        self, placed: Placed, request: GenerateRequest, revoked: asyncio.Future[ServiceError], probe: Probe | None
    ) -> AsyncGenerator[Event, None]:
        watch = _Watch(placed, time.monotonic() + request.timeout + DEADLINE_SLACK, revoked)
        given_up = asyncio.ensure_future(self._give_up(watch))
        response: NodeResponse | None = None
        try:
            with cut_short(given_up):
                response = await self._answered(placed, request)
            if response.status != 200:
                raise _node_failed(f"node {placed.node_id} answered with status {response.status}")
            self.breakers.undecided(placed.node_id, placed.epoch, probe)
            # From here on each token waits for the node's bytes alone: a task or a timer for it would cost more than
            # all else. Who gives the request up wakes whoever waits for bytes.
            given_up.add_done_callback(partial(_end_stream, watch, response))
            if placed.confirmation is not None:
                placed.confirmation.add_done_callback(partial(_end_unconfirmed, watch, response))
            frames = Frames(EVENT_LIMIT)
            while chunk := await response.read():
                if placed.confirmation is not None and not (watch.has_token or await placed.confirmation):
                    raise all_full()
                for event in _decode(frames, chunk, placed.node_id):
                    watch.has_token = watch.has_token or isinstance(event, Token)
                    if isinstance(event, Done | Failed):
                        await _read_end(response)
                        yield event
                        return
                    yield event
            raise _node_failed(f"node {placed.node_id} ended the stream early")
        except (TimeoutError, OSError) as error:
            reason = type(error).__name__
            raise _node_failed(f"the connection to node {placed.node_id} failed ({reason})") from error
        finally:
            watch.over = True
            given_up.cancel()
            if response is not None:
                response.close()

    async def _answered(self, placed: Placed, request: GenerateRequest) -> NodeResponse:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await self._connections.post(placed.url, "/generate", msgspec.msgpack.encode(request))

    async def _give_up(self, watch: _Watch) -> Exception:
        """Why the request is to end, as soon as it is: revoked, its deadline passed by far, or the node silent."""
        while True:
            await asyncio.wait({watch.revoked}, timeout=TICK if watch.has_token else FIRST_TICK)
            if watch.revoked.done():
                return watch.revoked.result()
            if time.monotonic() > watch.deadline:
                return ServiceError("timeout", "the node did not end the request at its deadline")
            if await self._is_silent(watch):
                return _node_failed(f"node {watch.placed.node_id} has fallen silent")

    async def _is_silent(self, watch: _Watch) -> bool:
        silence = await self._state.silence(watch.placed.node_id, watch.placed.epoch)
        if watch.has_token or silence < self._first_silence:
            return silence > self._silence
        nodes = await self._state.table()
        return silence > self._silence or bool((nodes.live & nodes.ready).any())


def _end_stream(watch: _Watch, response: NodeResponse, given_up: asyncio.Task[Exception]) -> None:
    if not (watch.over or given_up.cancelled()):
        error = given_up.exception() or given_up.result()
        assert isinstance(error, Exception)
        response.fail(error)


def _end_unconfirmed(watch: _Watch, response: NodeResponse, confirmation: asyncio.Future[bool]) -> None:
    """The node may keep its first event until it has room."""
    if not (watch.over or confirmation.cancelled() or confirmation.exception() or confirmation.result()):
        response.fail(all_full())


def _node_failed(message: str) -> NodeFailure:
    return NodeFailure(ServiceError("node_failed", message), retryable=True)


def _circuit_open(node_id: str) -> NodeFailure:
    message = f"node {node_id} could not be talked to lately, and another request tries now"
    return NodeFailure(ServiceError("unavailable", message, retry_after=FIRST_PAUSE), retryable=True)


def _decode(frames: Frames, chunk: bytes, node_id: str) -> list[Event]:
    try:
        return [decode_event(body) for body in frames.feed(chunk)]
    except (FrameError, msgspec.DecodeError) as error:
        raise _node_failed(f"node {node_id} sent something that is not an event ({error})") from error


async def _read_end(response: NodeResponse) -> None:
    """Read the end of the reply, so that the connection can be used again; not worth waiting for."""
    try:
        async with asyncio.timeout(EOF_SECONDS):
            while await response.read():
                pass
    except (TimeoutError, OSError, ServiceError, NodeFailure):
        return  # the caller closes the connection
