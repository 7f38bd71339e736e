"""Requests that wait for a place in the batch, in the order of fair shares."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from cluster.fair_shares import FairShares, in_fair_order, token_cost
from cluster.messages import SloClass
from cluster.queue_shares import QueueShares
from node_agent.engine.request import Request


class WaitingQueue:
    """Queue of `limit` requests at most, and of those that were preempted. It charges what is served to the shares."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.shares = FairShares()
        self._requests: dict[str, Request] = {}
        self._queue_shares = QueueShares()
        self._classes: dict[SloClass, int] = {"strict": 0, "standard": 0, "best_effort": 0}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the waiting requests in the order in which they came."""
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def strict(self) -> int:
        """Returns the number of waiting requests of class strict."""
        return self._classes["strict"]

    @property
    def standard(self) -> int:
        """Returns the number of waiting requests of class standard."""
        return self._classes["standard"]

    @property
    def tenants(self) -> Collection[str]:
        """Returns the tenants that wait."""
        return self._queue_shares.tenants

    def waiting_of(self, tenant: str) -> int:
        """Returns the number of the tenant's waiting requests."""
        return self._queue_shares.count(tenant)

    def in_order(self) -> Iterator[Request]:
        """Yields the waiting requests as their turns come, by the virtual token counters; the caller may remove those
        it was given."""
        return in_fair_order(self._requests.values(), self.shares)

    @property
    def full(self) -> bool:
        return len(self._requests) >= self.limit

    def displaced_by(self, newcomer: Request) -> Request | None:
        """Returns the request that gives its place in a full queue to the newcomer. For a strict one that is the newest
        best-effort request, of any tenant; else the newest of the tenant with most waiting for its weight, if that is
        more than the newcomer's; else, for a function with places kept for it that fewer wait in, the newest of the
        tenant's without. Requests that have begun to answer stay. Returns None when the newcomer has to go."""
        crowded = self._queue_shares.tenant_to_displace(newcomer.tenant, newcomer.weight)
        # Who has begun to answer must not be sent away.
        going = [r for r in self._requests.values() if not r.generated]
        best_effort = [r for r in going if r.slo_class == "best_effort" and newcomer.slo_class == "strict"]
        candidates = best_effort or [r for r in going if r.tenant == crowded] or self._unreserved(newcomer, going)
        return candidates[-1] if candidates else None

    def _unreserved(self, newcomer: Request, going: list[Request]) -> list[Request]:
        """Returns which of the tenant's requests yield to one within its function's reserved concurrency."""
        of_tenant = [r for r in going if r.tenant == newcomer.tenant]
        within = sum(r.function == newcomer.function for r in of_tenant) < newcomer.reserved
        return [r for r in of_tenant if not r.reserved] if within else []

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._queue_shares.join(request.tenant, request.weight)
        self._classes[request.slo_class] += 1
        self.shares.join(request.tenant, request.function)

    def remove(self, request: Request) -> None:
        """Removes a request from the queue. Raises KeyError when it does not wait."""
        del self._requests[request.id]
        self._queue_shares.leave(request.tenant)
        self._classes[request.slo_class] -= 1
        self.shares.leave(request.tenant, request.function)

    def take(self, request: Request) -> None:
        """Removes a request that gets its place in the batch, and charges what of its prompt is to be computed: not
        again after a preemption. Raises KeyError when it does not wait."""
        if not request.preemptions:
            self._charge(request, token_cost(max(0, request.prompt_len - request.computed), 0, request.rank))
        self.remove(request)

    def charge_token(self, request: Request) -> None:
        """Charges one generated token."""
        self._charge(request, token_cost(0, 1, request.rank))

    def counter(self, request: Request) -> float:
        """The counter of its tenant: the least is served first, in the batch, too."""
        return self.shares.tenant(request.tenant)

    def _charge(self, request: Request, service: float) -> None:
        self.shares.charge(request.tenant, request.function, request.weight, service)
