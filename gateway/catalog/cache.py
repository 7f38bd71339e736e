"""Cache of the registry's answers.

An answer is valid for `fresh` seconds after it was last confirmed, and for `grace` seconds while the registry is
unavailable.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, TypeVar

from adapters.errors import StoreUnavailable

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


MAX_CACHED = 50_000
PATIENCE = 1.0
"""Seconds to wait for the registry while an older answer is cached. A hanging registry thus does not block calls."""


@dataclass(eq=False)
class GraceCache(Generic[K, V]):
    """Cache of successful answers. Errors are not cached, so a new deploy is visible at once.

    An unconfirmed answer that is requested in the second half of its validity is reloaded in the background, so that
    frequently used answers never make a caller wait. `fresh`, `grace` and `patience` are seconds.
    """

    load: Callable[[K], Awaitable[V]]
    _: KW_ONLY
    clock: Callable[[], float]
    fresh: float
    grace: float
    limit: int = MAX_CACHED
    patience: float = PATIENCE
    confirmed: Callable[[K], float] = lambda _: float("-inf")
    """Function that returns the time, by `clock`, at which the answer for a key was last known to be current."""
    is_final: Callable[[V], bool] = lambda _: True
    """Function that returns whether an answer can be confirmed. Other answers are valid for `fresh` seconds."""
    _cached: OrderedDict[K, tuple[V, float]] = field(default_factory=OrderedDict, init=False)
    _loading: dict[K, asyncio.Task[V]] = field(default_factory=dict, init=False)
    _patience_ends: dict[K, float] = field(default_factory=dict, init=False)
    """Time, by the event loop's clock, until which callers wait for each load in progress."""

    async def get(self, key: K) -> V:
        """Returns the answer for a key, cached or loaded.

        Raises the exceptions of `load`. It raises StoreUnavailable only if no answer younger than `grace` is cached.
        """
        cached = self._cached.get(key)
        current_at = None if cached is None else self._current_at(key, *cached)
        if cached is not None and current_at is not None and self.clock() - current_at < self.fresh:
            is_confirmed = current_at > cached[1]
            if not is_confirmed and self.clock() - current_at > self.fresh / 2 and key not in self._loading:
                self._begin(key)
            return cached[0]
        load = self._loading.get(key) or self._begin(key)
        if cached is None or current_at is None or self.clock() - current_at >= self.grace:
            return await asyncio.shield(load)
        # If the load has already taken `patience` seconds, there is no further wait.
        patience_s = self._patience_ends.get(key, 0.0) - asyncio.get_running_loop().time()
        await asyncio.wait({load}, timeout=max(0.0, patience_s))
        if not load.done() or isinstance(load.exception(), StoreUnavailable):
            return cached[0]
        return load.result()

    def forget_where(self, matches: Callable[[K], bool]) -> None:
        """Forgets matching answers. The next `get` loads them again and ignores loads that started earlier."""
        for key in [key for key in self._cached if matches(key)]:
            del self._cached[key]
        for key in [key for key in self._loading if matches(key)]:
            del self._loading[key], self._patience_ends[key]

    def _current_at(self, key: K, answer: V, asked_at: float) -> float:
        """Returns the time, by `clock`, at which the answer, requested at `asked_at`, was last known to be current."""
        return max(asked_at, self.confirmed(key)) if self.is_final(answer) else asked_at

    def _begin(self, key: K) -> asyncio.Task[V]:
        task = asyncio.ensure_future(self._load_one(key))
        # Retrieved here as well, because all waiting callers may have been cancelled.
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
