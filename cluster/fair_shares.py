"""Fair order of requests: weighted virtual token counters (VTC, Sheng et al., OSDI 2024) of tenants, and of each
tenant's functions.

A counter holds the service that its owner has had, divided by its weight; the next to be served is the one with the
least. An owner that comes to wait after a pause is lifted to the least counter of those that wait, so that a pause
banks no credit. Between any two owners that wait all the time, service per weight then differs by no more than one
request's prompt or one batch's output costs, whatever they send. The engine and the simulator share this code.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Protocol, TypeVar

PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0
"""Per token, as in the paper: a token of output takes about twice the time of one of a prompt."""
RANK_PRICE = 1 / 256
"""Extra cost of a token for each rank of its adapter: a quarter at rank 64."""
MAX_IDLE_TENANTS, MAX_IDLE_FUNCTIONS = 4096, 64
"""Remembered while they don't wait; those who are ahead least are forgotten first."""


def token_cost(prompt: int, output: int, rank: int) -> float:
    """Returns the service that a request costs, in the unit of a prompt token of the base model. `rank`: the adapter's
    largest, 0 without one."""
    return (prompt * PROMPT_PRICE + output * OUTPUT_PRICE) * (1 + rank * RANK_PRICE)


class Counters:
    """Counters of one level: the service that each owner had, by weight. The caller calls `join` when a request of an
    owner begins to wait, and `leave` when it waits no more."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._values: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._floor = 0.0
        self._last: str | None = None
        """who left when nobody else waited"""
        self._sweep_above = 2 * max_idle

    def __len__(self) -> int:
        """Returns how many owners have a counter here, those included who don't wait."""
        return len(self._values)

    def __getitem__(self, owner: str) -> float:
        return self._values.get(owner, self._floor)

    @property
    def floor(self) -> float:
        """The least counter of the owners that wait: nobody who comes to wait is below it."""
        self._raise_floor()
        return self._floor

    def join(self, owner: str) -> None:
        """Counts one more waiting request of the owner."""
        if owner not in self._waiting:
            self._values[owner] = max(self[owner], self.floor)
        self._waiting[owner] = self._waiting.get(owner, 0) + 1

    def leave(self, owner: str) -> None:
        """Counts one waiting request of the owner less. Raises KeyError when none of the owner's waits."""
        remaining = self._waiting[owner] - 1
        if remaining:
            self._waiting[owner] = remaining
            return
        self._raise_floor()
        del self._waiting[owner]
        if not self._waiting:
            self._last = owner

    def charge(self, owner: str, service: float) -> list[str]:
        """Adds service per weight to the owner's counter. Returns the owners that were forgotten meanwhile."""
        self._values[owner] = self[owner] + service
        return self._sweep() if len(self._values) > self._sweep_above else []

    def _raise_floor(self) -> None:
        if self._waiting:
            self._floor = max(self._floor, min(self._values[owner] for owner in self._waiting))
        elif self._last is not None:
            self._floor = max(self._floor, self[self._last])

    def _sweep(self) -> list[str]:
        """Forgets owners who don't wait: those whose counter says no more than the floor does, and of the others, if
        they are too many, those with the least. Returns the forgotten ones."""
        self._raise_floor()
        idle = sorted((value, owner) for owner, value in self._values.items() if owner not in self._waiting)
        at_floor = sum(value <= self._floor for value, _ in idle)
        forgotten = [owner for _, owner in idle[: max(at_floor, len(idle) - self._max_idle)]]
        for owner in forgotten:
            del self._values[owner]
        self._sweep_above = 2 * max(self._max_idle, len(self._values))
        return forgotten


class FairShares:
    """Counters of the service of tenants and, within each, of its functions. A tenant's service is weighted; its
    functions share it equally."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all counters, so that all tenants begin equal; called when nothing waits or runs."""
        self._tenants = Counters(MAX_IDLE_TENANTS)
        self._functions: dict[str, Counters] = {}

    def join(self, tenant: str, function: str) -> None:
        """Counts one more waiting request of the tenant and its function."""
        self._tenants.join(tenant)
        self._of(tenant).join(function)

    def leave(self, tenant: str, function: str) -> None:
        """Counts one waiting request of the function less: it was started, or was cancelled."""
        self._tenants.leave(tenant)
        self._of(tenant).leave(function)

    def charge(self, tenant: str, function: str, weight: float, service: float) -> None:
        """Adds the `service` that a request was given to the counters of its tenant, per `weight`, and of its
        function."""
        self._of(tenant).charge(function, service)
        for forgotten in self._tenants.charge(tenant, service / weight):
            self._functions.pop(forgotten, None)

    def tenant(self, tenant: str) -> float:
        """Returns the tenant's counter."""
        return self._tenants[tenant]

    @property
    def floor(self) -> float:
        """The counter to which a tenant that comes to wait is lifted (VTC): the least of those that wait, and it never
        falls. With none waiting: at least the counter of the tenant that left last."""
        return self._tenants.floor

    def function(self, tenant: str, function: str) -> float:
        """Returns the function's counter among those of its tenant."""
        return self._functions[tenant][function] if tenant in self._functions else 0.0

    def _of(self, tenant: str) -> Counters:
        return self._functions.setdefault(tenant, Counters(MAX_IDLE_FUNCTIONS))


class Waits(Protocol):
    """A request that waits for service."""

    @property
    def tenant(self) -> str: ...
    @property
    def function(self) -> str: ...
    @property
    def first_token_deadline(self) -> float:
        """Returns when the request's first token is due, by any clock that all requests share."""


R = TypeVar("R", bound=Waits)


def in_fair_order(waiting: Iterable[R], shares: FairShares) -> Iterator[R]:
    """Yields each waiting request once. The tenant with the least counter comes first, then its function with the least
    counter, then the earliest deadline. Counters may be charged meanwhile: they are read again for each request, but
    must not fall."""
    groups: dict[str, dict[str, list[R]]] = {}
    for request in sorted(waiting, key=attrgetter("first_token_deadline")):
        groups.setdefault(request.tenant, {}).setdefault(request.function, []).append(request)

    def of_tenant(tenant: str, functions: dict[str, list[R]]) -> tuple[float, Iterator[R]]:
        turns = {name: (requests[0].first_token_deadline, iter(requests)) for name, requests in functions.items()}
        deadline = min(deadline for deadline, _ in turns.values())
        return deadline, _by_turns(turns, lambda name: shares.function(tenant, name))

    return _by_turns({name: of_tenant(name, functions) for name, functions in groups.items()}, shares.tenant)


def _by_turns(owners: dict[str, tuple[float, Iterator[R]]], counter: Callable[[str], float]) -> Iterator[R]:
    """Yields the owners' requests by turns: each time one of the owner with the least counter, of equal ones the
    earliest due. Each owner comes with the time at which its first request is due, and its requests."""
    heap = [(counter(owner), deadline, owner) for owner, (deadline, _) in owners.items()]
    heapq.heapify(heap)
    while heap:
        last_read, deadline, owner = heap[0]
        now = counter(owner)
        if now > last_read:
            heapq.heapreplace(heap, (now, deadline, owner))
            continue
        request = next(owners[owner][1], None)
        if request is None:
            heapq.heappop(heap)
            continue
        yield request
        heapq.heapreplace(heap, (counter(owner), request.first_token_deadline, owner))
