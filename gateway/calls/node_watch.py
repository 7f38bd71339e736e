"""Ends the streams of dead nodes. All streams of a node share one watch.

A node is dead when neither a record nor a byte of any of its streams has arrived for too long. So a node whose records
get lost while its tokens still arrive keeps its streams. A silent node is asked for its record before, because records
may not arrive for the gateway's own reasons: none does while it stops.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from cluster.errors import ServiceError
from cluster.state import ClusterState
from gateway.scheduling.route import Route

TICK_S = 0.25
MAX_TICK_S = 4 * TICK_S
"""Seconds between two checks beyond which this process itself was held up. Records and bytes that have arrived
meanwhile are read before the next check."""


class NodeFailure(Exception):
    """A node did not serve the request. `retryable`: True if another node may serve it."""

    def __init__(self, error: ServiceError, *, retryable: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.retryable = retryable


def node_failed(message: str) -> NodeFailure:
    return NodeFailure(ServiceError("node_failed", message), retryable=True)


class WatchedStream:
    """Stream of one request, watched together with its node's other streams."""

    def __init__(self, watch: _Watch, deadline: float) -> None:
        """`deadline`: monotonic seconds."""
        self._watch = watch
        self.deadline = deadline
        self.has_token = False
        self.given_up: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Future that gets the reason if the stream is given up."""

    def give_up(self, reason: Exception) -> None:
        if not self.given_up.done():
            self.given_up.set_result(reason)

    def interrupt(self, reason: asyncio.Future[Exception]) -> None:
        """Gives the stream up once `reason` has a result, which becomes the result of `given_up`."""
        if not reason.cancelled():
            self.give_up(reason.result())

    def record_bytes(self) -> None:
        """Records that bytes have arrived from the node."""
        self._watch.last_bytes_at = time.monotonic()


class _Watch:
    """Watch of one node as long as it has open streams."""

    def __init__(self, node_id: str, epoch: str) -> None:
        self.node_id, self.epoch = node_id, epoch
        self.streams: set[WatchedStream] = set()
        self.last_bytes_at = -math.inf
        self.task: asyncio.Task[None] | None = None


class NodeWatches:
    """Watches of all nodes with open streams.

    `silence`: seconds without a record or a byte after which a node is taken for dead. `first_silence`: the same limit
    for a request that has no token yet, while other nodes can take it over. `ask`: asks a node for its record, without
    waiting for the answer. It is called once the node has been silent for half of the shorter limit.
    """

    def __init__(
        self, state: ClusterState, *, silence: float, first_silence: float, ask: Callable[[str], Awaitable[None]]
    ) -> None:
        self._state = state
        self._ask = ask
        self._silence = silence
        self._first_silence = min(first_silence, silence)
        self._watches: dict[tuple[str, str], _Watch] = {}

    @contextmanager
    def watched(self, route: Route, deadline: float) -> Iterator[WatchedStream]:
        """Yields a watched stream. It is given up if its node is dead or `deadline` (monotonic seconds) has passed."""
        key = route.node_id, route.epoch
        watch = self._watches.get(key)
        if watch is None:
            watch = self._watches[key] = _Watch(*key)
            watch.task = asyncio.create_task(self._run(watch))
        stream = WatchedStream(watch, deadline)
        watch.streams.add(stream)
        try:
            yield stream
        finally:
            watch.streams.discard(stream)
            if not watch.streams:
                del self._watches[key]
                assert watch.task is not None
                watch.task.cancel()

    async def _run(self, watch: _Watch) -> None:
        """Checks the node every TICK_S seconds. Cancelled when the node's last stream ends."""
        try:
            while True:
                began = time.monotonic()
                await asyncio.sleep(TICK_S)
                if time.monotonic() - began <= MAX_TICK_S:
                    await self._check(watch)
        except Exception as error:  # these streams are no longer watched
            for stream in watch.streams:
                stream.give_up(error)

    async def _check(self, watch: _Watch) -> None:
        recorded = await self._state.seconds_since_report(watch.node_id, watch.epoch)
        now = time.monotonic()
        silence = min(recorded, now - watch.last_bytes_at)
        if silence > self._first_silence / 2:
            await self._ask(watch.node_id)
        first = silence >= self._first_silence and await self._others_serve()
        for stream in watch.streams:
            if now > stream.deadline:
                stream.give_up(ServiceError("timeout", "the node did not end the request at its deadline"))
            elif silence > self._silence or (first and not stream.has_token):
                stream.give_up(node_failed(f"node {watch.node_id} does not answer any more"))

    async def _others_serve(self) -> bool:
        nodes = await self._state.table()
        return bool((nodes.live & nodes.ready).any())
