"""Moves calls between nodes after they were routed, where the policy asks for it (gateway.scheduling.dlora).

A call keeps its node until it has a place on the other one; then its stream ends, and it continues there after the
tokens that have come, as after a failed node. Without such a policy none of this exists.
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
from gateway.scheduling.dlora import Migrates, Movable
from gateway.scheduling.placement import Placed


class Migration:
    """The open generations of this process, and the task that moves them."""

    def __init__(self, state: ClusterState, base: str, policy: Migrates) -> None:
        """`base`: fingerprint of the base model."""
        self._state, self._base, self._policy = state, base, policy
        self.open: dict[str, MovableGeneration] = {}
        """Generations by request id."""

    def generation(self, dispatcher: Dispatcher, invocation: Invocation, index: int) -> Generation:
        """Makes a generation that can be moved: the Dispatcher's `generation`."""
        return MovableGeneration(self, dispatcher, invocation, index)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Moves generations as long as the context lasts."""
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
            Movable(id, row, call.times.started_at is not None, len(call.request.token_ids) + call.times.tokens)
            for id, call in self.open.items()
            if not call.moved and call.node is not None and (row := nodes.row(call.node)) is not None
        ]
        for move in self._policy.moves(loads, movable):
            target, call = nodes.ids[move.row], self.open.get(move.id)
            if target is not None and call is not None:
                await self._move(move.id, call, names - {target})

    async def _move(self, id: str, call: MovableGeneration, excluded: frozenset[str]) -> None:
        try:
            placed = await call.route(excluded)
        except ServiceError:  # it has no place any more: the call stays where it is
            return
        if not call.move_to(placed):
            await self._state.release(placed.node_id, id)


class MovableGeneration(Generation):
    """A generation that `migration` knows of while it is open, and may move once."""

    def __init__(self, migration: Migration, dispatcher: Dispatcher, invocation: Invocation, index: int) -> None:
        super().__init__(dispatcher, invocation, index)
        self._migration = migration
        self.moved = False
        """True once it was moved: it is not moved again."""
        self._attempt: asyncio.Future[Exception] | None = None
        """Ends the attempt that runs, with the reason as result."""

    def move_to(self, placed: Placed) -> bool:
        """Lets it continue there. Returns False when it does not run any more."""
        if self._attempt is None or self._attempt.done():
            return False
        self.moved = True
        self._attempt.set_result(Rerouted(placed))
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
