"""Scale from zero: if no node runs, calls wait for the first one, provided that an autoscaler runs that can start it.

Without an autoscaler no node would start, so the calls are refused at once.
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
"""Name of the autoscaler's lease; its holder sets the pools' sizes."""
LED_S, UNLED_S = 1.0, 0.1
"""Seconds for which a check of the autoscaler's lease is cached: the first value if an autoscaler holds it, the second
if none does."""
POLL_S = 0.05
"""Seconds between two checks for a node while calls wait."""
RETRY_PAUSE_S = 1.0
"""Seconds after which a waiting call is routed again if the first node was full."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 600.0


class FirstNodeWait:
    """Wait of calls until a first node has started. `seconds`: maximum wait; with 0 calls do not wait. `clock`:
    monotonic seconds."""

    def __init__(
        self, state: ClusterState, leases: Leases, base: str, seconds: float, clock: Callable[[], float]
    ) -> None:
        self.seconds = seconds
        self._state, self._leases, self._base, self._clock = state, leases, base, clock
        self._check_lock = asyncio.Lock()
        self._checked_at, self._was_led = -math.inf, False
        self._waiting: asyncio.Task[None] | None = None
        self._waiting_calls = 0
        self._since: float | None = None
        """Time at which the current wait for a first node began; None once a node was ready. A pause of up to
        MAX_RETRY_S between two calls does not end the wait."""
        self._last_ended_at = -math.inf
        """Time at which the latest call's wait ended."""
        self._last_wait: float | None = None
        """Duration, in seconds, of the previous wait that ended with a ready node; None before the first one."""

    async def should_wait(self, without: Collection[str] = ()) -> bool:
        """Returns whether a call that no node can take now should wait for a node.

        `without`: nodes that have refused the call.
        """
        if self.seconds <= 0 or not await self._check_autoscaler():
            return False
        return not serving(await self._state.table(), self._base, without)

    async def wait(self, until: float, cut: asyncio.Future[Exception]) -> None:
        """Waits until a node is ready, until `until` (by the clock), or until `cut` has a result.

        Raises the exceptions of reading the nodes.
        """
        if self._waiting is None or self._waiting.done():
            if self._since is None or self._clock() - self._last_ended_at > MAX_RETRY_S:
                self._since = self._clock()
            self._waiting = asyncio.create_task(self._until_ready())
        self._waiting_calls += 1
        try:
            ends: list[asyncio.Future[Any]] = [self._waiting, cut]
            timeout = max(0.0, until - self._clock())
            await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._waiting.done() and not self._waiting.cancelled():
                self._waiting.result()
        finally:
            self._waiting_calls, self._last_ended_at = self._waiting_calls - 1, self._clock()
            if not self._waiting_calls and not self._waiting.done():
                self._waiting.cancel()

    def timeout_error(self) -> ServiceError:
        """Returns the error for a call that waited for the maximum time.

        Its Retry-After estimates the seconds until a node is ready: the previous wait for a first node, minus the time
        that the current wait has lasted. If there was no previous wait, or the current one already lasts as long,
        Retry-After is the time that the current wait has lasted. The value is at least MIN_RETRY_S and at most
        MAX_RETRY_S.
        """
        passed = 0.0 if self._since is None else self._clock() - self._since
        expected = passed if self._last_wait is None or self._last_wait <= passed else self._last_wait - passed
        why = f"no node became ready to serve this model within {self.seconds:g} s; one has been asked for"
        return ServiceError("unavailable", why, retry_after=min(max(expected, MIN_RETRY_S), MAX_RETRY_S))

    async def _until_ready(self) -> None:
        while not serving(await self._state.table(), self._base):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if self._since is not None:
            self._last_wait, self._since = self._clock() - self._since, None

    async def _check_autoscaler(self) -> bool:
        async with self._check_lock:  # a concurrent caller waits for this query's result
            if self._clock() - self._checked_at >= (LED_S if self._was_led else UNLED_S):
                self._was_led = await autoscaler(self._leases) is not None
                self._checked_at = self._clock()
        return self._was_led


async def autoscaler(leases: Leases) -> str | None:
    """Returns the holder of the autoscaler's lease; None if there is none, or if it is unknown."""
    try:
        return (await leases.get(AUTOSCALER)).holder or None
    except RedisAway:
        return None


def serving(nodes: NodeTable, base: str, without: Collection[str] = ()) -> bool:
    """Returns whether a node that is not in `without` is ready to serve the base model."""
    return any(nodes.ids[row] not in without for row in nodes.serving(base).rows.tolist())
