"""Moves calls between nodes after they were placed, where the routing policy asks for it (gateway.scheduling.moves).

A call keeps its node until it has a place on the other one; then its stream ends, and it goes on there behind the
tokens that have come, as after a failed node (gateway.calls.resumption).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from cluster.errors import ServiceError
from cluster.state import ClusterState
from gateway.background import background
from gateway.scheduling.moves import Migrates, Movable
from gateway.scheduling.placement import Placed

if TYPE_CHECKING:
    from gateway.calls.dispatch import Generation


class Moved(Exception):
    """The call is to go on at the place, which is reserved for it."""

    def __init__(self, placed: Placed) -> None:
        super().__init__(f"moved to node {placed.node_id}")
        self.placed = placed


class Migration:
    """The open calls of this process, and the task that moves them."""

    def __init__(self, state: ClusterState, base: str, policy: object) -> None:
        """`base`: fingerprint of the base model. Without a policy that migrates no call is moved."""
        self._state, self._base = state, base
        self._policy = policy if isinstance(policy, Migrates) else None
        self._calls: dict[str, Generation] = {}

    @contextmanager
    def track(self, id: str, call: Generation) -> Iterator[None]:
        self._calls[id] = call
        try:
            yield
        finally:
            del self._calls[id]

    def running(self) -> AbstractAsyncContextManager[None]:
        return background(*([] if self._policy is None else [partial(self._run, self._policy)]))

    async def _run(self, policy: Migrates) -> None:
        while True:
            await asyncio.sleep(policy.period)
            await self._rebalance(policy)

    async def _rebalance(self, policy: Migrates) -> None:
        nodes = await self._state.table()
        rows = nodes.serving(self._base).rows
        loads = {row: float(nodes.requests[row]) for row in rows.tolist()}
        names = frozenset(filter(None, nodes.ids))
        calls = [
            Movable(id, row, call.started_at is not None, len(call.request.token_ids) + call.tokens)
            for id, call in self._calls.items()
            if not call.moved and call.node is not None and (row := nodes.row(call.node)) is not None
        ]
        for move in policy.moves(loads, calls):
            target, call = nodes.ids[move.row], self._calls.get(move.id)
            if target is not None and call is not None:
                await self._move(move.id, call, names - {target})

    async def _move(self, id: str, call: Generation, others: frozenset[str]) -> None:
        try:
            placed = await call.place_again(others)
        except ServiceError:  # it has no place any more: the call stays where it is
            return
        if not call.move_to(placed):
            await self._state.release(placed.node_id, id)
