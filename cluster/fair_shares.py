"""Fair order of requests: weighted virtual token counters (VTC, Sheng et al., OSDI 2024) of tenants and their
functions.

A counter holds the service that its owner has received, divided by its weight. The owner with the lowest counter is
served next. When an owner joins the queue after a pause, its counter is raised to the lowest counter of the waiting
owners, so that a pause earns no credit. For any two owners that wait all the time, the service per weight thus differs
by a bounded amount, whatever they send: the cost of one request's prompt or of one batch's output. The engine and the
simulator share this code.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Protocol, TypeVar

PROMPT_PRICE, OUTPUT_PRICE = 1.0, 2.0
"""Service cost per token of prompt and of output, as in the paper: an output token takes about twice as long."""
RANK_PRICE = 1 / 256
"""Additional share of a token's cost per rank of its adapter: a quarter at rank 64."""
MAX_IDLE_TENANTS, MAX_IDLE_FUNCTIONS = 4096, 64
"""Maximum numbers of tenants, and of a tenant's functions, that keep a counter while they don't wait. The lowest
counters are dropped first."""


def token_cost(prompt: int, output: int, rank: int) -> float:
    """Returns the service cost of a request; the unit is one prompt token of the base model. `rank` is the adapter's
    largest rank, 0 without an adapter."""
    return (prompt * PROMPT_PRICE + output * OUTPUT_PRICE) * (1 + rank * RANK_PRICE)


class Counters:
    """Counters of one level (tenants, or the functions of a tenant): each owner's service per weight. The caller calls
    `join` when a request of an owner starts to wait, and `leave` when it stops waiting."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._values: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._floor = 0.0
        self._last: str | None = None
        """Owner that was the last one to leave."""
        self._sweep_above = 2 * max_idle

    def __len__(self) -> int:
        """Returns the number of owners with a counter, including those that don't wait."""
        return len(self._values)

    def __getitem__(self, owner: str) -> float:
        return self._values.get(owner, self._floor)

    @property
    def floor(self) -> float:
        """Lowest counter of the waiting owners. An owner that starts to wait is raised to it."""
        self._raise_floor()
        return self._floor

    def join(self, owner: str) -> None:
        """Adds one waiting request of the owner."""
        if owner not in self._waiting:
            self._values[owner] = max(self[owner], self.floor)
        self._waiting[owner] = self._waiting.get(owner, 0) + 1

    def leave(self, owner: str) -> None:
        """Removes one waiting request of the owner. Raises KeyError when the owner has none."""
        remaining = self._waiting[owner] - 1
        if remaining:
            self._waiting[owner] = remaining
            return
        self._raise_floor()
        del self._waiting[owner]
        if not self._waiting:
            self._last = owner

    def charge(self, owner: str, service: float) -> list[str]:
        """Adds `service` (already divided by the weight) to the owner's counter. Returns the owners whose counters were
        dropped meanwhile."""
        self._values[owner] = self[owner] + service
        return self._sweep() if len(self._values) > self._sweep_above else []

    def _raise_floor(self) -> None:
        if self._waiting:
            self._floor = max(self._floor, min(self._values[owner] for owner in self._waiting))
        elif self._last is not None:
            self._floor = max(self._floor, self[self._last])

    def _sweep(self) -> list[str]:
        """Drops counters of owners that don't wait, and returns these owners. Drops those that are not above the floor.
        Of the others it drops the lowest ones beyond the maximum number."""
        self._raise_floor()
        idle = sorted((value, owner) for owner, value in self._values.items() if owner not in self._waiting)
        at_floor = sum(value <= self._floor for value, _ in idle)
        forgotten = [owner for _, owner in idle[: max(at_floor, len(idle) - self._max_idle)]]
        for owner in forgotten:
            del self._values[owner]
        self._sweep_above = 2 * max(self._max_idle, len(self._values))
        return forgotten


class FairShares:
    """Counters of tenants and, within each tenant, of its functions. A tenant's service is divided by the tenant's
    weight. The functions of a tenant have equal weights."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Resets all counters, so that all tenants start equal. Call it when no request waits or runs."""
        self._tenants = Counters(MAX_IDLE_TENANTS)
        self._functions: dict[str, Counters] = {}

    def join(self, tenant: str, function: str) -> None:
        """Adds one waiting request of the tenant and its function."""
        self._tenants.join(tenant)
        self._of(tenant).join(function)

    def leave(self, tenant: str, function: str) -> None:
        """Removes one waiting request of the tenant and its function, which was started or cancelled."""
        self._tenants.leave(tenant)
        self._of(tenant).leave(function)

    def charge(self, tenant: str, function: str, weight: float, service: float) -> None:
        """Adds the `service` that a request received to the counters of its tenant (divided by `weight`) and its
        function."""
        self._of(tenant).charge(function, service)
        for forgotten in self._tenants.charge(tenant, service / weight):
            self._functions.pop(forgotten, None)

    def tenant(self, tenant: str) -> float:
        """Returns the tenant's counter."""
        return self._tenants[tenant]

    @property
    def floor(self) -> float:
        """Lowest counter of the waiting tenants.

        When a tenant starts to wait, its counter is raised to this value if it is lower (VTC). The value never falls.
        When no tenant waits, it is at least the counter of the tenant that stopped waiting last.
        """
        return self._tenants.floor

    def function(self, tenant: str, function: str) -> float:
        """Returns the function's counter among those of its tenant."""
        return self._functions[tenant][function] if tenant in self._functions else 0.0

    def _of(self, tenant: str) -> Counters:
        return self._functions.setdefault(tenant, Counters(MAX_IDLE_FUNCTIONS))


class Waits(Protocol):
    """Interface of a request that waits for service."""

    @property
    def tenant(self) -> str: ...
    @property
    def function(self) -> str: ...
    @property
    def first_token_deadline(self) -> float:
        """Returns the deadline of the request's first token, by a clock that all requests share."""


R = TypeVar("R", bound=Waits)


def in_fair_order(waiting: Iterable[R], shares: FairShares) -> Iterator[R]:
    """Yields each waiting request once, in fair order. The tenant with the lowest counter comes first, then its
    function with the lowest counter, then the earliest deadline. Counters may be charged meanwhile, but must not fall:
    they are read again for each request."""
    groups: dict[str, dict[str, list[R]]] = {}
    for request in sorted(waiting, key=attrgetter("first_token_deadline")):
        groups.setdefault(request.tenant, {}).setdefault(request.function, []).append(request)

    def of_tenant(tenant: str, functions: dict[str, list[R]]) -> tuple[float, Iterator[R]]:
        turns = {name: (requests[0].first_token_deadline, iter(requests)) for name, requests in functions.items()}
        deadline = min(deadline for deadline, _ in turns.values())
        return deadline, _by_turns(turns, lambda name: shares.function(tenant, name))

    return _by_turns({name: of_tenant(name, functions) for name, functions in groups.items()}, shares.tenant)


def _by_turns(owners: dict[str, tuple[float, Iterator[R]]], counter: Callable[[str], float]) -> Iterator[R]:
    """Yields the requests of the owner with the lowest counter, one at a time. Among equal counters the earliest
    deadline comes first. `owners` has, for each owner, the deadline of its first request, and its requests."""
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
