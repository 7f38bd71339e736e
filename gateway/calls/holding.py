"""Calls that meet an empty cluster: held for a while where an autoscaler is there to start a node.

Without an autoscaler nothing would come of waiting, and they are answered at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import Any

from cluster.errors import ServiceError
from cluster.leases import Leases
from cluster.node_table import NodeTable
from cluster.redis_link import RedisAway
from cluster.state import ClusterState

AUTOSCALER = "autoscaler"
"""The lease of whoever decides the pools' sizes."""
LED_SECONDS, UNLED_SECONDS = 1.0, 0.1
"""So long it counts that the lease was seen with a holder, or without: one who comes must not be missed for long."""
POLL_SECONDS = 0.05
"""Between two looks for a node while calls are held."""
AGAIN_SECONDS = 1.0
"""After which a held call that found the first node full tries again."""
LEAST_RETRY, MOST_RETRY = 1.0, 600.0


class Hold:
    """`seconds`: the longest hold; 0: never. `clock` is monotonic seconds."""

    def __init__(
        self, state: ClusterState, leases: Leases, base: str, seconds: float, clock: Callable[[], float]
    ) -> None:
        self.seconds = seconds
        self._state, self._leases, self._base, self._clock = state, leases, base, clock
        self._look = asyncio.Lock()
        self._seen, self._led = -math.inf, False
        self._waiting: asyncio.Task[None] | None = None
        self._held = 0
        self._since: float | None = None
        """Since when calls have been waiting for a first node, with pauses of MOST_RETRY at most."""
        self._last = -math.inf
        """When the last of them gave up."""
        self._took: float | None = None
        """How long they had to, the last time that one came."""

    async def applies(self, without: Collection[str] = ()) -> bool:
        """Whether a call that no node can take now would wait for one; those `without` have refused it."""
        if self.seconds <= 0 or not await self._is_led():
            return False
        return not serving(await self._state.table(), self._base, without)

    async def wait(self, until: float, cut: asyncio.Future[Exception]) -> None:
        """Returns when a node is ready, at `until` (by the clock), or when `cut` has a result. Raises what looking for
        nodes raises."""
        if self._waiting is None or self._waiting.done():
            if self._since is None or self._clock() - self._last > MOST_RETRY:
                self._since = self._clock()
            self._waiting = asyncio.create_task(self._until_ready())
        self._held += 1
        try:
            ends: list[asyncio.Future[Any]] = [self._waiting, cut]
            left = max(0.0, until - self._clock())
            await asyncio.wait(ends, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if self._waiting.done() and not self._waiting.cancelled():
                self._waiting.result()
        finally:
            self._held, self._last = self._held - 1, self._clock()
            if not self._held and not self._waiting.done():
                self._waiting.cancel()

    def given_up(self) -> ServiceError:
        """Returns the error that answers a call which was held for as long as may be. A first node may be there, by how
        long the last one took, else after as long again as has passed."""
        passed = 0.0 if self._since is None else self._clock() - self._since
        expected = passed if self._took is None or self._took <= passed else self._took - passed
        why = f"no node became ready to serve this model within {self.seconds:g} s; one has been asked for"
        return ServiceError("unavailable", why, retry_after=min(max(expected, LEAST_RETRY), MOST_RETRY))

    async def _until_ready(self) -> None:
        while not serving(await self._state.table(), self._base):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        if self._since is not None:
            self._took, self._since = self._clock() - self._since, None

    async def _is_led(self) -> bool:
        async with self._look:  # who comes while it is asked waits for that answer, not for the one before
            if self._clock() - self._seen >= (LED_SECONDS if self._led else UNLED_SECONDS):
                self._led = await autoscaler(self._leases) is not None
                self._seen = self._clock()
        return self._led


async def autoscaler(leases: Leases) -> str | None:
    """Returns who decides the pools' sizes; None: nobody, or it can't be told."""
    try:
        return (await leases.look(AUTOSCALER)).holder or None
    except RedisAway:
        return None


def serving(nodes: NodeTable, base: str, without: Collection[str] = ()) -> bool:
    """Whether any other node is ready to serve this base."""
    return any(nodes.ids[row] not in without for row in nodes.serving(base).rows.tolist())
