"""Requests that wait to enter the batch, in fair-share order."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from cluster.fair_shares import FairShares, in_fair_order, token_cost
from cluster.messages import SloClass
from cluster.queue_shares import QueueShares
from node_agent.engine.request import Request


class WaitingQueue:
    """Queue of at most `limit` requests, plus preempted ones. It charges served tokens to the shares."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.shares = FairShares()
        self._requests: dict[str, Request] = {}
        self._queue_shares = QueueShares()
        self._classes: dict[SloClass, int] = {"strict": 0, "standard": 0, "best_effort": 0}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the waiting requests in order of arrival."""
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
        """Returns the tenants with waiting requests."""
        return self._queue_shares.tenants

    def waiting_of(self, tenant: str) -> int:
        """Returns the number of the tenant's waiting requests."""
        return self._queue_shares.count(tenant)

    def in_order(self) -> Iterator[Request]:
        """Yields the waiting requests in fair-share order, by virtual token counters. The caller may remove yielded
        requests."""
        return in_fair_order(self._requests.values(), self.shares)

    @property
    def full(self) -> bool:
        return len(self._requests) >= self.limit

    def displaced_by(self, newcomer: Request) -> Request | None:
        """Returns the request that a newcomer displaces from a full queue; None if the newcomer is refused.

        For a strict newcomer it is the newest best-effort request of any tenant. Otherwise it is the newest request of
        the tenant with most waiting requests per weight, if that tenant has more of them per weight than the
        newcomer's. Otherwise, if the newcomer's function has reserved concurrency free, it is the newest of its
        tenant's requests without a reservation. Requests with generated tokens stay.
        """
        crowded = self._queue_shares.tenant_to_displace(newcomer.tenant, newcomer.weight)
        # Requests with generated tokens must not be refused.
        going = [r for r in self._requests.values() if not r.generated]
        best_effort = [r for r in going if r.slo_class == "best_effort" and newcomer.slo_class == "strict"]
        candidates = best_effort or [r for r in going if r.tenant == crowded] or self._unreserved(newcomer, going)
        return candidates[-1] if candidates else None

    def _unreserved(self, newcomer: Request, going: list[Request]) -> list[Request]:
        """Returns the tenant's requests that yield to a newcomer within its function's reserved concurrency."""
        of_tenant = [r for r in going if r.tenant == newcomer.tenant]
        within = sum(r.function == newcomer.function for r in of_tenant) < newcomer.reserved
        return [r for r in of_tenant if not r.reserved] if within else []

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._queue_shares.join(request.tenant, request.weight)
        self._classes[request.slo_class] += 1
        self.shares.join(request.tenant, request.function)

    def remove(self, request: Request) -> None:
        """Removes a request from the queue. Raises KeyError if it is not waiting."""
        del self._requests[request.id]
        self._queue_shares.leave(request.tenant)
        self._classes[request.slo_class] -= 1
        self.shares.leave(request.tenant, request.function)

    def take(self, request: Request) -> None:
        """Removes an admitted request, and charges its uncomputed prompt tokens unless it was preempted before. Raises
        KeyError if it is not waiting."""
        if not request.preemptions:
            self._charge(request, token_cost(max(0, request.prompt_len - request.computed), 0, request.rank))
        self.remove(request)

    def charge_token(self, request: Request) -> None:
        """Charges one generated token."""
        self._charge(request, token_cost(0, 1, request.rank))

    def counter(self, request: Request) -> float:
        """Returns the virtual token counter of the request's tenant. The tenant with the smallest is served first, also
        in the batch."""
        return self.shares.tenant(request.tenant)

    def _charge(self, request: Request, service: float) -> None:
        self.shares.charge(request.tenant, request.function, request.weight, service)
