"""Pages of other origins: which may call the gateway, and what their scripts may read of its replies.

Credentials of a browser, such as cookies, are never allowed: callers show keys, which a page has to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from gateway.origins import ANY

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
READABLE = (
    *("x-request-id", "x-garnish-function", "x-garnish-version", "x-garnish-node", "x-garnish-cold-start"),
    *("server-timing", "retry-after", "etag", "location"),
)
"""Headers of replies that scripts may read in addition to those that all may be read."""
MAX_AGE = 600
"""Seconds for which a browser need not ask again."""


def cors(origins: Sequence[str]) -> list[Middleware]:
    """Returns the middleware that answers browsers' questions; none without an allowed origin."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=METHODS,
            allow_headers=[ANY],
            allow_credentials=False,
            expose_headers=READABLE,
            max_age=MAX_AGE,
        )
    ]
