"""A cache of answers of the registry: valid for a second since they were last confirmed, for a minute while it is
away."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

from adapters.errors import StoreUnavailable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


KEPT_SECONDS = 600.0
"""Seconds for which confirmations count. An answer in use is renewed after half of it: a gateway of a release that
marks nothing (adapters.epoch) may have written to the registry."""
MAX_KNOWN = 50_000
"""Answers that are kept, about a kilobyte each."""
PATIENCE = 1.0
"""Seconds to wait for the registry while there is an older answer: a registry that hangs must not hold up calls."""


@dataclass(eq=False)
class GraceCache(Generic[K, V]):
    """Only answers are kept: what was missing is asked for again each time, so that a deploy is seen at once.

    An answer that is asked for in the second half of its time is renewed meanwhile, so that those which are asked for
    all the time never make anyone wait.
    """

    load: Callable[[K], Awaitable[V]]
    _: KW_ONLY
    clock: Callable[[], float]
    fresh: float
    grace: float
    limit: int = MAX_KNOWN
    patience: float = PATIENCE
    confirmed: Callable[[K], float] = lambda _: float("-inf")
    """Returns when, by `clock`, it was last known that a cached answer would still be the same."""
    _cached: OrderedDict[K, tuple[V, float]] = field(default_factory=OrderedDict, init=False)
    _loading: dict[K, asyncio.Task[V]] = field(default_factory=dict, init=False)
    _patience_ends: dict[K, float] = field(default_factory=dict, init=False)
    """End of patience by the event loop's time, for each load in progress."""

    async def get(self, key: K) -> V:
        """Raises what `load` raises; StoreUnavailable only when nothing younger than the grace is known."""
        cached = self._cached.get(key)
        if cached is not None and self._age(key, cached[1]) < self.fresh:
            valid_s = KEPT_SECONDS if self.confirmed(key) > cached[1] else self.fresh
            if self.clock() - cached[1] > valid_s / 2 and key not in self._loading:
                self._begin(key)
            return cached[0]
        load = self._loading.get(key) or self._begin(key)
        if cached is None or self._age(key, cached[1]) >= self.grace:
            return await asyncio.shield(load)
        # What has hung for as long before holds up nobody any more.
        patience_s = self._patience_ends.get(key, 0.0) - asyncio.get_running_loop().time()
        await asyncio.wait({load}, timeout=max(0.0, patience_s))
        if not load.done() or isinstance(load.exception(), StoreUnavailable):
            return cached[0]
        return load.result()

    def forget_where(self, matches: Callable[[K], bool]) -> None:
        """Forgets matching answers: the next `get` loads them again, and a load that began before does not count."""
        for key in [key for key in self._cached if matches(key)]:
            del self._cached[key]
        for key in [key for key in self._loading if matches(key)]:
            del self._loading[key], self._patience_ends[key]

    def _age(self, key: K, asked_at: float) -> float:
        """Returns the seconds since an answer that was asked for then was last known to be valid."""
        now = self.clock()
        return now - (max(asked_at, self.confirmed(key)) if now - asked_at < KEPT_SECONDS else asked_at)

    def _begin(self, key: K) -> asyncio.Task[V]:
        task = asyncio.ensure_future(self._load_one(key))
        # Retrieved here too: when every waiter has gone, nobody else looks at the task's exception.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._loading[key] = task
        self._patience_ends[key] = asyncio.get_running_loop().time() + self.patience
        return task

    async def _load_one(self, key: K) -> V:
        task = asyncio.current_task()
        asked_at = self.clock()
        try:
            value = await self.load(key)
        except StoreUnavailable:
            raise
        except Exception:
            if self._loading.get(key) is task:
                self._cached.pop(key, None)
            raise
        else:
            if self._loading.get(key) is task:
                self._cached[key] = (value, asked_at)
                self._cached.move_to_end(key)
                if len(self._cached) > self.limit:
                    self._cached.popitem(last=False)
            return value
        finally:
            if self._loading.get(key) is task:
                del self._loading[key], self._patience_ends[key]
