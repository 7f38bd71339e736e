"""Fair shares of tenants in the work of one gateway worker: jobs that it runs, or calls of its batches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping

from gateway.jobs.windows import Function, Windows


class Shares:
    """Says whose work starts next, and how much of a tenant and of a function may run at once.

    The tenant of which the least runs comes first. With `weighted` it is the tenant of which the least was started: the
    sum over its started work of 1 / (the tenant's weight at that time).
    """

    def __init__(
        self, clock: Callable[[], float], *, at_once: int, per_tenant: int | None = None, weighted: bool = False
    ) -> None:
        """`clock`: monotonic seconds. `at_once`: maximum work of a function. `per_tenant`: maximum work of a tenant; by
        default `at_once`."""
        self.windows = Windows(at_once, clock)
        self.weights: dict[str, float] = {}
        """Weights of tenants; 1 for others."""
        self._per_tenant = at_once if per_tenant is None else per_tenant
        self._weighted = weighted
        self._active: Counter[Function] = Counter()
        self._active_of_tenants: Counter[str] = Counter()
        self._started: dict[str, float] = {}

    def may_begin(self, function: Function) -> bool:
        """Returns whether more work of the function may start."""
        has_room = self._active_of_tenants[function[0]] < self._per_tenant
        return has_room and self.windows.may_begin(function, self._active[function])

    def pick(self, tenants: Collection[str]) -> str | None:
        """Returns the tenant whose work starts next, a random one among equals; None without tenants. A new tenant has
        used as much of its share as the tenant that has used the least."""
        use: Mapping[str, float] = self._active_of_tenants
        if self._weighted:
            lowest = min(self._started.values(), default=0.0)
            use = self._started = {**dict.fromkeys(tenants, lowest), **self._started}
        return min(tenants, key=lambda tenant: (use[tenant], random.random()), default=None)

    def begin(self, function: Function) -> None:
        """Counts work that starts now."""
        tenant, _ = function
        if self._weighted:
            self._started[tenant] = self._started.get(tenant, 0.0) + 1 / self.weights.get(tenant, 1.0)
        self._active[function] += 1
        self._active_of_tenants[tenant] += 1

    def end(self, function: Function) -> None:
        """Counts work as ended, whatever its outcome."""
        self._active -= Counter([function])
        self._active_of_tenants -= Counter([function[0]])

    def record_refusal(self, function: Function, retry_after_s: float) -> None:
        """Lowers the function's maximum, because running work was refused. It may be accepted after `retry_after_s`
        seconds."""
        self.windows.record_refusal(function, retry_after_s, self._active[function])

    def keep(self, tenants: Container[str]) -> None:
        """Forgets the tenants that are not in `tenants` and of which nothing runs."""
        for tenant in {*self._started, *self.weights}:
            if tenant not in tenants and not self._active_of_tenants[tenant]:
                self._started.pop(tenant, None)
                self.weights.pop(tenant, None)
        self.windows.forget_old()
