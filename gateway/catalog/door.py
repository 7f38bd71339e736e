"""Takes requests' amounts from the rates of their tenants, or refuses the requests, before any work is done for them.

Every route that a tenant's key may use has a rate (gateway.http.rates).
"""

from __future__ import annotations

from starlette.requests import Request

from adapters.tenants import Limits
from cluster.errors import ServiceError
from cluster.limits import Charge, LimitState, RateName
from gateway.catalog.callers import Callers
from gateway.http.rates import RouteRate
from gateway.workers.metrics import Metrics

UNITS: dict[RateName, str] = {
    "rps": "send {:g} requests per second",
    "text_bytes_per_second": "have {:g} bytes of text per second tokenized or detokenized",
    "reads_per_second": "read {:g} times per second",
    "writes_per_second": "change things {:g} times per second",
}


class Door:
    """Rates of all tenants. `max_body`: maximum bytes of a call's body."""

    def __init__(self, callers: Callers, limits: LimitState, metrics: Metrics, max_body: int) -> None:
        self._callers = callers
        self._limits = limits
        self._metrics = metrics
        self._max_body = max_body

    async def pay(self, request: Request, tenant: str, limit: RouteRate) -> None:
        """Takes what a request costs from its tenant's rate.

        Raises ServiceError `rate_limited`, and NotFound, StoreUnavailable for the tenant.
        """
        account = await self._callers.account(tenant)
        charge = charge_of(account.limits, limit.rate, limit.amount_of(request, self._max_body))
        if charge is not None:
            await spend(self._limits, self._metrics, tenant, charge)


def charge_of(limits: Limits, rate: RateName, amount: float = 1.0) -> Charge | None:
    """Returns what `amount` costs a tenant with these limits; None if the rate is not limited."""
    per_second = getattr(limits, rate)
    return None if per_second is None else Charge(rate, per_second, amount)


async def spend(limits: LimitState, metrics: Metrics, tenant: str, charge: Charge) -> None:
    """Takes a charge. Raises ServiceError `rate_limited`, with the seconds after which it may be tried again."""
    refused = await limits.spend(tenant, (charge,))
    if refused is not None:
        metrics.count_refusal(tenant, charge.limit)
        may = UNITS[charge.limit].format(charge.rate)
        why = f"the tenant may {may} (limits.{charge.limit}); try again later"
        raise ServiceError("rate_limited", why, retry_after=refused.seconds)
