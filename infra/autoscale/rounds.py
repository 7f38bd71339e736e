"""Rounds of the autoscaler. A round reads the load of each pool, decides its size, and sets it with a driver.

Sizes do not change if the load is not available from the gateway, or if the lease is not held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from infra.autoscale.driver import Deferred, PoolDriver, PoolSize
from infra.autoscale.sizing import Decision, Load, Sizer, Targets, desired_size
from infra.errors import InfraError, Interrupted

START_SECONDS = 300.0
"""Maximum seconds after a growth for which a pool does not grow further because nodes are starting."""
GAP_SECONDS = 30.0
"""Seconds without a poll of the load after which earlier decisions are dropped."""
FIRST_PAUSE_S, MAX_PAUSE_S = 4.0, 60.0

Action = Literal["none", "set", "waits", "held"]


class LoadUnknown(InfraError):
    """The gateway does not answer, or the load that it reports is stale."""


class PoolView(msgspec.Struct, frozen=True):
    """The load and the number of ready units of a pool, according to the gateway.

    A unit is what the pool's driver counts: a node, or in AWS an instance, which may have several nodes.
    """

    load: Load
    ready: float


class LoadSnapshot(msgspec.Struct, frozen=True):
    pools: Mapping[str, PoolView]
    unplaced: Load


class ScaledPool(msgspec.Struct, frozen=True):
    """A pool that is to be scaled."""

    name: str
    driver: PoolDriver
    targets: Targets


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a round for a pool.

    The actions are: `none` (no change), `set` (a size was set), `waits` (another round must continue, for example
    because a change is in progress) and `held` (not scaled because of an error).
    """

    pool: str
    action: Action
    reason: str
    size: int | None = None
    wanted: int | None = None
    load: Load | None = None


IDLE = Load(open_requests=0, queue_wait=0.0, demand=0.0, backlog=0.0, attainment=None)


class _State:
    """State of a pool between rounds: its sizer, the time of its last growth, and its driver's backoff."""

    def __init__(self, targets: Targets) -> None:
        self.sizer = Sizer(targets)
        self.grown = float("-inf")
        self.pause, self.again = FIRST_PAUSE_S, float("-inf")


class Autoscaler:
    """Decides and sets the sizes of pools, in rounds.

    `read_snapshot` returns the load, or raises LoadUnknown. `trouble` returns the reason why the lease is not held, or
    None if it is held; it is also called before each change. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        pools: Sequence[ScaledPool],
        read_snapshot: Callable[[], LoadSnapshot],
        trouble: Callable[[], str | None],
        clock: Callable[[], float],
    ) -> None:
        self._pools, self._read_snapshot, self._trouble, self._clock = pools, read_snapshot, trouble, clock
        self._states = {pool.name: _State(pool.targets) for pool in pools}
        self._polled_at = float("-inf")

    def round(self, *, once: bool = False) -> list[RoundResult]:
        """Reads the load of each pool, changes sizes where necessary, and returns a result per pool.

        With `once` this is the only round, and no pool shrinks.
        """
        if trouble := self._trouble():
            return self._all_held(trouble)
        try:
            snapshot = self._read_snapshot()
        except LoadUnknown as error:
            return self._all_held(str(error))
        polled_at = self._clock()  # taken before the changes of this round, which may take minutes
        if polled_at - self._polled_at > GAP_SECONDS:
            self._forget()
        self._polled_at = polled_at
        sizes = {pool.name: self._size(pool) for pool in self._pools}
        views = assign_unplaced(snapshot, self._pools, sizes)
        return [self._scale(pool, sizes[pool.name], views[pool.name], polled_at, once) for pool in self._pools]

    def _forget(self) -> None:
        for pool in self._pools:
            self._states[pool.name].sizer = Sizer(pool.targets)

    def _all_held(self, reason: str) -> list[RoundResult]:
        return [RoundResult(pool=pool.name, action="held", reason=reason) for pool in self._pools]

    def _size(self, pool: ScaledPool) -> PoolSize | InfraError:
        try:
            return pool.driver.size(pool.name)
        except InfraError as error:
            return error

    def _scale(
        self, pool: ScaledPool, current: PoolSize | InfraError, view: PoolView, polled_at: float, once: bool
    ) -> RoundResult:
        if isinstance(current, InfraError):
            action: Action = "waits" if isinstance(current, Deferred) else "held"
            return RoundResult(pool=pool.name, action=action, reason=str(current), load=view.load)
        decision = self._decide(pool, current, view, polled_at, once)
        decided = RoundResult(
            pool=pool.name, action="none", reason=decision.reason, size=current.desired, wanted=decision.size,
            load=view.load,
        )  # fmt: skip
        return self._act(pool, current, decided)

    def _decide(self, pool: ScaledPool, current: PoolSize, view: PoolView, now: float, once: bool) -> Decision:
        state = self._states[pool.name]
        targets = msgspec.structs.replace(pool.targets, min=current.min, max=current.max)
        state.sizer.targets = targets
        starting = view.ready < current.desired and now - state.grown < START_SECONDS
        requested = desired_size(view.load, current.desired, targets)
        if once:
            decision = requested
            if decision.size < current.desired:
                return Decision(current.desired, f"{decision.reason}; a single round makes no pool smaller")
        else:
            decision = state.sizer.decide(now, view.load, current.desired, starting=starting)
        if requested.size > current.desired and starting:
            return Decision(
                current.desired, f"{requested.reason}; {view.ready:g} of {current.desired} are ready so far"
            )
        return decision

    def _act(self, pool: ScaledPool, current: PoolSize, decided: RoundResult) -> RoundResult:
        state, size = self._states[pool.name], decided.wanted
        assert size is not None
        if size == current.desired and current.settled:
            return decided
        if self._clock() < state.again:
            return msgspec.structs.replace(decided, action="waits", reason=f"{decided.reason}; it failed a moment ago")
        if trouble := self._trouble():
            return msgspec.structs.replace(decided, action="held", reason=trouble)
        try:
            pool.driver.set_desired(pool.name, size)
        except Interrupted:
            raise
        except Deferred as error:
            return msgspec.structs.replace(decided, action="waits", reason=f"{decided.reason}; {error}")
        except InfraError as error:
            state.again, state.pause = self._clock() + state.pause, min(2 * state.pause, MAX_PAUSE_S)
            return msgspec.structs.replace(decided, action="held", reason=f"{decided.reason}; {error}")
        state.pause = FIRST_PAUSE_S
        if size > current.desired:
            state.grown = self._clock()
        if size == current.desired:
            return msgspec.structs.replace(
                decided, action="set", reason="nodes that were missing, or drained, are back"
            )
        return msgspec.structs.replace(decided, action="set")


def assign_unplaced(
    snapshot: LoadSnapshot, pools: Sequence[ScaledPool], sizes: Mapping[str, PoolSize | InfraError]
) -> dict[str, PoolView]:
    """Returns the PoolView of each pool, by name.

    The load of unplaced requests is added to the first pool, in the file's order, that can grow.
    """
    views = {pool.name: snapshot.pools.get(pool.name, PoolView(IDLE, 0)) for pool in pools}
    takers = [name for name, size in sizes.items() if isinstance(size, PoolSize) and size.desired < size.max]
    if takers:
        first = views[takers[0]]
        views[takers[0]] = PoolView(sum_loads(first.load, snapshot.unplaced), first.ready)
    return views


def sum_loads(first: Load, second: Load) -> Load:
    shares = [load.attainment for load in (first, second) if load.attainment is not None]
    return Load(
        open_requests=first.open_requests + second.open_requests,
        queue_wait=max(first.queue_wait, second.queue_wait),
        demand=first.demand + second.demand,
        backlog=first.backlog + second.backlog,
        attainment=min(shares) if shares else None,
    )
