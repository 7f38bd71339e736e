"""Query parameters, as strict as bodies."""

from __future__ import annotations

import re

from starlette.requests import Request

from cluster.errors import ServiceError

_ZERO = re.compile(r"0(\.0{0,3})?", re.ASCII)


def known_only(request: Request, *known: str) -> None:
    """Raises ServiceError `validation_failed` for a parameter that the route has not, or that is there twice."""
    seen: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in known:
            raise ServiceError("validation_failed", f"unknown query parameter {name[:100]!r}", param=name[:100])
        if name in seen:
            raise ServiceError("validation_failed", f"the query parameter {name} is there more than once", param=name)
        seen.add(name)


def flag(request: Request, name: str) -> bool:
    """True or false; false when absent."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise ServiceError("validation_failed", f"{name} must be true or false", param=name)
    return value == "true"


def integer(request: Request, name: str, default: int, low: int, high: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high):
        raise ServiceError("validation_failed", f"{name} must be a whole number from {low} to {high}", param=name)
    return int(value)


def asks_for_events(accept: str) -> bool:
    """Whether an Accept header names text/event-stream, with a weight above 0."""
    for entry in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        if kind == "text/event-stream":
            weights = [value.strip() for key, _, value in (part.partition("=") for part in parameters) if key == "q"]
            return not any(_ZERO.fullmatch(weight) for weight in weights)
    return False
