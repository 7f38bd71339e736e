"""Rate limits of routes: what each request takes from its tenant's rates before its body is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request

from cluster.limits import RateName

MIN_TEXT_BYTES = 1024
"""Bytes that a request with a smaller body takes from `text_bytes_per_second`, so that the number of such requests is
limited, too."""


class RouteRate(msgspec.Struct, frozen=True):
    """Rate that limits a route, and the amount that one request takes."""

    rate: RateName
    amount: float = 1.0
    """Amount that each request takes; at least this many bytes if `by_body`."""
    by_body: bool = False

    def amount_of(self, request: Request, max_body: int) -> float:
        """Returns the amount that a request takes. A body of unstated size counts as `max_body` bytes."""
        if not self.by_body:
            return self.amount
        stated = request.headers.get("content-length", "")
        size = int(stated) if stated.isdecimal() and len(stated) < 20 else max_body
        return max(self.amount, min(size, max_body))


CALL = RouteRate("rps")
TEXT = RouteRate("text_bytes_per_second", MIN_TEXT_BYTES, by_body=True)
READ = RouteRate("reads_per_second")
READ_MANY = RouteRate("reads_per_second", 10.0)
"""Rate of routes that may read a hundred objects or more."""
WRITE = RouteRate("writes_per_second")

TakeRate = Callable[[Request, str, RouteRate], Awaitable[None]]
"""Function that takes a request's amount from a rate of its tenant. Raises ServiceError `rate_limited`."""
