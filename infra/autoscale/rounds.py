"""A round: look at the load of each pool, decide its size, and have its driver bring that about.

What can't be known is not guessed: without the gateway's picture, or without the lease, sizes stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from infra.autoscale.driver import Deferred, PoolDriver, PoolSize
from infra.autoscale.sizing import Decision, Load, Sizer, Targets, wanted
from infra.errors import InfraError, Interrupted

START_SECONDS = 300.0
"""While nodes that were asked for are not ready yet, no more are asked for, for so long at most."""
GAP_SECONDS = 30.0
"""After a longer time without a look at the load, what was seen before says nothing."""
FIRST_PAUSE, LONGEST_PAUSE = 4.0, 60.0
"""Seconds before a driver that failed is called again."""

Action = Literal["none", "set", "waits", "held"]


class Away(InfraError):
    """The gateway does not tell the load, or what it tells is stale."""


class View(msgspec.Struct, frozen=True):
    """One pool, as the gateway sees it; counted as its driver counts (instances, where one has several nodes)."""

    load: Load
    ready: float


class Picture(msgspec.Struct, frozen=True):
    pools: Mapping[str, View]
    """Those with nodes or requests."""
    unplaced: Load
    """Requests that no node could take."""


class Scaled(msgspec.Struct, frozen=True):
    """A pool that is to be scaled."""

    name: str
    driver: PoolDriver
    targets: Targets


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """What a round made of a pool. `held`: something is wrong, or missing; `waits`: it is under way."""

    pool: str
    action: Action
    reason: str
    size: int | None = None
    """That was desired before; None: not known."""
    wanted: int | None = None
    load: Load | None = None


IDLE = Load(open_requests=0, queue_wait=0.0, demand=0.0, backlog=0.0, attainment=None)


class _State:
    """What is known of a pool between rounds: its sizer, when it last grew, and when a driver that failed may be called
    again."""

    def __init__(self, targets: Targets) -> None:
        self.sizer = Sizer(targets)
        self.grown = float("-inf")
        self.pause, self.again = FIRST_PAUSE, float("-inf")


class Autoscaler:
    """Decides and sets the sizes of pools, round by round. `picture` raises Away; `trouble` returns why the lease is
    not held (None: it is), and is asked again before each change. `clock` is monotonic seconds."""

    def __init__(
        self,
        pools: Sequence[Scaled],
        picture: Callable[[], Picture],
        trouble: Callable[[], str | None],
        clock: Callable[[], float],
    ) -> None:
        self._pools, self._picture, self._trouble, self._clock = pools, picture, trouble, clock
        self._states = {pool.name: _State(pool.targets) for pool in pools}
        self._seen = float("-inf")

    def round(self, *, once: bool = False) -> list[Decided]:
        """Looks at every pool once, sets its size where that is to change, and returns what was made of each. `once`:
        no round came before and none comes later; then a pool may only grow."""
        if trouble := self._trouble():
            return self._all_held(trouble)
        try:
            picture = self._picture()
        except Away as error:
            return self._all_held(str(error))
        looked = self._clock()  # not when the changes of this round are made: those may take minutes
        if looked - self._seen > GAP_SECONDS:
            self._forget()
        self._seen = looked
        sizes = {pool.name: self._size(pool) for pool in self._pools}
        views = shared_out(picture, self._pools, sizes)
        return [self._scale(pool, sizes[pool.name], views[pool.name], looked, once) for pool in self._pools]

    def _forget(self) -> None:
        for pool in self._pools:
            self._states[pool.name].sizer = Sizer(pool.targets)

    def _all_held(self, reason: str) -> list[Decided]:
        return [Decided(pool=pool.name, action="held", reason=reason) for pool in self._pools]

    def _size(self, pool: Scaled) -> PoolSize | InfraError:
        try:
            return pool.driver.size(pool.name)
        except InfraError as error:
            return error

    def _scale(self, pool: Scaled, known: PoolSize | InfraError, view: View, looked: float, once: bool) -> Decided:
        if isinstance(known, InfraError):
            action: Action = "waits" if isinstance(known, Deferred) else "held"
            return Decided(pool=pool.name, action=action, reason=str(known), load=view.load)
        decision = self._decide(pool, known, view, looked, once)
        told = Decided(
            pool=pool.name, action="none", reason=decision.reason, size=known.desired, wanted=decision.size,
            load=view.load,
        )  # fmt: skip
        return self._act(pool, known, told)

    def _decide(self, pool: Scaled, known: PoolSize, view: View, now: float, once: bool) -> Decision:
        state = self._states[pool.name]
        targets = msgspec.structs.replace(pool.targets, min=known.min, max=known.max)
        state.sizer.targets = targets
        starting = view.ready < known.desired and now - state.grown < START_SECONDS
        asked = wanted(view.load, known.desired, targets)
        if once:
            decision = asked
            if decision.size < known.desired:
                return Decision(known.desired, f"{decision.reason}; a single round makes no pool smaller")
        else:
            decision = state.sizer.decide(now, view.load, known.desired, starting=starting)
        if asked.size > known.desired and starting:
            return Decision(known.desired, f"{asked.reason}; {view.ready:g} of {known.desired} are ready so far")
        return decision

    def _act(self, pool: Scaled, known: PoolSize, told: Decided) -> Decided:
        state, size = self._states[pool.name], told.wanted
        assert size is not None
        if size == known.desired and known.settled:
            return told
        if self._clock() < state.again:
            return msgspec.structs.replace(told, action="waits", reason=f"{told.reason}; it failed a moment ago")
        if trouble := self._trouble():
            return msgspec.structs.replace(told, action="held", reason=trouble)
        try:
            pool.driver.set_desired(pool.name, size)
        except Interrupted:
            raise
        except Deferred as error:
            return msgspec.structs.replace(told, action="waits", reason=f"{told.reason}; {error}")
        except InfraError as error:
            state.again, state.pause = self._clock() + state.pause, min(2 * state.pause, LONGEST_PAUSE)
            return msgspec.structs.replace(told, action="held", reason=f"{told.reason}; {error}")
        state.pause = FIRST_PAUSE
        if size > known.desired:
            state.grown = self._clock()
        if size == known.desired:
            return msgspec.structs.replace(told, action="set", reason="nodes that were missing, or drained, are back")
        return msgspec.structs.replace(told, action="set")


def shared_out(
    picture: Picture, pools: Sequence[Scaled], sizes: Mapping[str, PoolSize | InfraError]
) -> dict[str, View]:
    """Returns each pool's view. Requests that no node could take are counted with the first pool that has room, in the
    file's order."""
    views = {pool.name: picture.pools.get(pool.name, View(IDLE, 0)) for pool in pools}
    takers = [name for name, size in sizes.items() if isinstance(size, PoolSize) and size.desired < size.max]
    if takers:
        first = views[takers[0]]
        views[takers[0]] = View(together(first.load, picture.unplaced), first.ready)
    return views


def together(one: Load, other: Load) -> Load:
    shares = [load.attainment for load in (one, other) if load.attainment is not None]
    return Load(
        open_requests=one.open_requests + other.open_requests,
        queue_wait=max(one.queue_wait, other.queue_wait),
        demand=one.demand + other.demand,
        backlog=one.backlog + other.backlog,
        attainment=min(shares) if shares else None,
    )
