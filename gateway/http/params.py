"""Query parameters and headers of requests, checked as strictly as bodies."""

from __future__ import annotations

import re

from starlette.requests import Request

from adapters.nearest import did_you_mean
from gateway.http.errors import invalid

SESSION_HEADER = "x-garnish-session"
TENANT_HEADER = "x-garnish-tenant"
MAX_SESSION = 256

_TAG = re.compile(r'(W/)?"([^"]*)"|(\d+)', re.ASCII)
_ZERO = re.compile(r"0(\.0{0,3})?", re.ASCII)


def known_only(request: Request, *names: str) -> None:
    """Raises ServiceError `validation_failed` for a query parameter that is unknown or occurs twice."""
    if not request.scope["query_string"]:
        return
    present: set[str] = set()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            why = f"unknown query parameter {name[:100]!r}{did_you_mean(name, names)}"
            raise invalid(name[:100], why, "unknown_parameter")
        if name in present:
            raise invalid(name, f"the query parameter {name} occurs more than once")
        present.add(name)


def flag(request: Request, name: str) -> bool:
    """Returns a boolean query parameter; False if absent. Raises ServiceError for another value."""
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise invalid(name, f"{name} must be true or false")
    return value == "true"


def integer(request: Request, name: str, default: int, low: int, high: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high):
        raise invalid(name, f"{name} must be a whole number from {low} to {high}")
    return int(value)


def asks_for_events(accept: str) -> bool:
    """Returns whether an Accept header names text/event-stream, with a weight above 0."""
    for entry in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        if kind == "text/event-stream":
            weights = [value.strip() for key, _, value in (part.partition("=") for part in parameters) if key == "q"]
            return not any(_ZERO.fullmatch(weight) for weight in weights)
    return False


def side(request: Request) -> str:
    """Returns the key that selects the version if an alias splits its calls: the session, else the request id.

    Raises ServiceError `validation_failed` for a session that is too long.
    """
    session = request.headers.get(SESSION_HEADER, "")
    if len(session) > MAX_SESSION:
        raise invalid(SESSION_HEADER, f"{SESSION_HEADER} may have at most {MAX_SESSION} characters")
    return f"session {session}" if session else f"request {request.state.request_id}"


def if_match(request: Request) -> frozenset[int] | None:
    """Returns the function's generations that the header If-Match lists; None if any generation matches.

    Raises ServiceError `validation_failed`, also for If-None-Match, which is not supported and must not be ignored.
    """
    if "if-none-match" in request.headers:
        message = "If-None-Match is not served with a change; send If-Match with the function's ETag"
        raise invalid("if-none-match", message)
    entries = [entry.strip() for line in request.headers.getlist("if-match") for entry in line.split(",")]
    if entries in ([], ["*"]):
        return None
    generations: set[int] = set()
    for entry in entries:
        tag = _TAG.fullmatch(entry)
        if tag is None:
            message = 'If-Match is an ETag of this function such as "7", several with commas in between, or * alone'
            raise invalid("if-match", message)
        generation = tag[2] or tag[3] or ""
        # Weak tags, and tags that this service never issued, match nothing.
        if not tag[1] and generation.isascii() and generation.isdigit() and len(generation) < 19:
            generations.add(int(generation))
    return frozenset(generations)


def etag(generation: int) -> str:
    return f'"{generation}"'
