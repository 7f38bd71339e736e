"""Moves calls between nodes after they were placed, where the routing policy asks for it (gateway.scheduling.moves).

A call keeps its node until it has a place on the other one; then its stream ends, and it goes on there behind the
tokens that have come, as after a failed node (gateway.calls.resumption).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from cluster.errors import ServiceError
from cluster.state import ClusterState
from gateway.background import background
from gateway.scheduling.moves import Migrates, Movable
from gateway.scheduling.placement import Placed


class Moved(Exception):
    """The call is to go on at the place, which is reserved for it."""

    def __init__(self, placed: Placed) -> None:
        super().__init__(f"moved to node {placed.node_id}")
        self.placed = placed


class MovableCall(Protocol):
    node: str | None
    """The id of the one that has it; None before it is placed."""
    moved: bool
    """It was moved, and is not moved again."""

    @property
    def begun(self) -> bool:
        """It has left the node's queue."""
        ...

    @property
    def computed_tokens(self) -> int:
        """Returns the number of tokens of the call's prompt and of those generated so far."""
        ...

    async def place_again(self, excluded: frozenset[str]) -> Placed:
        """Reserve a place on another node than these. Raises ServiceError when there is none."""
        ...

    def move_to(self, placed: Placed) -> bool:
        """Go on there. Returns False when the call does not run any more."""
        ...


class Migration:
    """The open calls of this process, and the task that moves them."""

    def __init__(self, state: ClusterState, base: str, policy: object) -> None:
        """`base`: fingerprint of the base model. Without a policy that migrates no call is moved."""
        self._state, self._base = state, base
        self._policy = policy if isinstance(policy, Migrates) else None
        self._calls: dict[str, MovableCall] = {}

    @contextmanager
    def track(self, id: str, call: MovableCall) -> Iterator[None]:
        self._calls[id] = call
        try:
            yield
        finally:
            del self._calls[id]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        works = [] if self._policy is None else [self._run]
        async with background(*works):
            yield

    async def _run(self) -> None:
        assert self._policy is not None
        while True:
            await asyncio.sleep(self._policy.period)
            await self._rebalance(self._policy)

    async def _rebalance(self, policy: Migrates) -> None:
        nodes = await self._state.table()
        rows = nodes.serving(self._base).rows
        loads = {row: float(nodes.requests[row]) for row in rows.tolist()}
        names = frozenset(filter(None, nodes.ids))
        calls = [
            Movable(id, row, call.begun, call.computed_tokens)
            for id, call in self._calls.items()
            if not call.moved and call.node is not None and (row := nodes.row(call.node)) is not None
        ]
        for move in policy.moves(loads, calls):
            target, call = nodes.ids[move.row], self._calls.get(move.id)
            if target is not None and call is not None:
                await self._move(move.id, call, names - {target})

    async def _move(self, id: str, call: MovableCall, others: frozenset[str]) -> None:
        try:
            placed = await call.place_again(others)
        except ServiceError:  # it has no place any more: the call stays where it is
            return
        if not call.move_to(placed):
            await self._state.release(placed.node_id, id)
