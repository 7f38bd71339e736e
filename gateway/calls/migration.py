"""Migrates calls between nodes after they were routed, if the policy asks for it (gateway.scheduling.dlora).

A call stays on its node until it has a place on the target. Then its stream ends, and it continues on the target after
the tokens that have arrived, as after a failed node. Without such a policy this module is unused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial

from cluster.errors import ServiceError
from cluster.state import ClusterState
from gateway.background import background
from gateway.calls.dispatch import Dispatcher, Generation, Rerouted
from gateway.calls.request import Invocation
from gateway.scheduling.dlora import Migrates, MovableRequest
from gateway.scheduling.route import Route


class Migration:
    """Open generations of this process, and the task that migrates them."""

    def __init__(self, state: ClusterState, base: str, policy: Migrates) -> None:
        """`base`: fingerprint of the base model."""
        self._state, self._base, self._policy = state, base, policy
        self.open: dict[str, MovableGeneration] = {}

    def generation(self, dispatcher: Dispatcher, invocation: Invocation, index: int) -> Generation:
        """Returns a generation that can be migrated. Used as the Dispatcher's `generation`."""
        return MovableGeneration(self, dispatcher, invocation, index)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Migrates generations as long as the context lasts."""
        return background(self._run)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._policy.period)
            await self._rebalance()

    async def _rebalance(self) -> None:
        nodes = await self._state.table()
        rows = nodes.serving(self._base).rows
        loads = {row: float(nodes.requests[row]) for row in rows.tolist()}
        names = frozenset(filter(None, nodes.ids))
        movable = [
            MovableRequest(id, row, call.times.started_at is not None, len(call.request.token_ids) + call.times.tokens)
            for id, call in self.open.items()
            if not call.moved and call.node is not None and (row := nodes.row(call.node)) is not None
        ]
        for move in self._policy.moves(loads, movable):
            target, call = nodes.ids[move.row], self.open.get(move.id)
            if target is not None and call is not None:
                await self._move(move.id, call, names - {target})

    async def _move(self, id: str, call: MovableGeneration, excluded: frozenset[str]) -> None:
        try:
            route = await call.route(excluded)
        except ServiceError:  # the target is full, so the call stays on its node
            return
        if not call.move_to(route):
            await self._state.release(route.node_id, id)


class MovableGeneration(Generation):
    """Generation that is registered with `migration` while it is open, and may be migrated once."""

    def __init__(self, migration: Migration, dispatcher: Dispatcher, invocation: Invocation, index: int) -> None:
        super().__init__(dispatcher, invocation, index)
        self._migration = migration
        self.moved = False
        """True once it was migrated; it is not migrated again."""
        self._attempt: asyncio.Future[Exception] | None = None
        """Future that interrupts the running attempt when it gets a result, which is the reason; None if no attempt is
        running."""

    def move_to(self, route: Route) -> bool:
        """Continues the generation on the node of `route`, and returns True. Returns False if no attempt is running."""
        if self._attempt is None or self._attempt.done():
            return False
        self.moved = True
        self._attempt.set_result(Rerouted(route))
        return True

    @contextmanager
    def _tracked(self) -> Iterator[asyncio.Future[Exception]]:
        with super()._tracked() as revoked:
            self._migration.open[self.request.id] = self
            try:
                yield revoked
            finally:
                del self._migration.open[self.request.id]

    def _interruption(self) -> asyncio.Future[Exception]:
        self._attempt = attempt = asyncio.get_running_loop().create_future()
        self._revoked.add_done_callback(partial(_pass_on, attempt))
        return attempt


def _pass_on(attempt: asyncio.Future[Exception], revoked: asyncio.Future[Exception]) -> None:
    if not revoked.cancelled() and not attempt.done():
        attempt.set_result(revoked.result())
