"""Outermost layer of the application: request ids, errors as replies, and the limit of concurrent requests."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adapters.errors import NoSuchFunction
from cluster.errors import ServiceError
from gateway.http.errors import ClientGone, error_reply, exhausted_resource, is_unexpected, to_service_error
from gateway.http.responses import json_response
from gateway.workers.metrics import Metrics

SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_SLASHES = re.compile("//+")
UNCOUNTED = ("/healthz", "/health", "/ping", "/readyz", "/cluster/record")
"""Paths that are served even if the gateway has reached its limit of concurrent requests. Otherwise it would look dead,
or would lose its nodes' records."""
SCALING = ("/pools", "/pools/autoscaler")
SCALING_ROOM = 16
"""Number of requests to SCALING paths that are served beyond the limit. They let an autoscaler see that the gateway is
full of waiting calls."""

log = logging.getLogger("gateway")


class OpenRequests:
    """Counts the open requests, and waits for the end of the last one."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def change(self, by: int) -> None:
        self.count += by
        if self.count:
            self._none.clear()
        else:
            self._none.set()

    async def wait_for_none(self, seconds: float) -> None:
        """Waits until no request is open, at most `seconds` seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._none.wait()
        except TimeoutError:
            log.warning("%d requests did not end in time", self.count)


class Boundary:
    """ASGI middleware around the application. Event streams pass through it unbuffered."""

    def __init__(self, app: ASGIApp, max_concurrent: int, metrics: Metrics, requests: OpenRequests) -> None:
        self._app = app
        self._max_concurrent = max_concurrent
        self._metrics = metrics
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain_path(scope["path"])
        reply, reserved = _Reply(scope, receive, send), ExitStack()
        scope["state"]["reserved"] = reserved
        counted = scope["path"] not in UNCOUNTED
        self._requests.change(counted)
        try:
            room = SCALING_ROOM if scope["path"] in SCALING else 0
            if counted and self._requests.count > self._max_concurrent + room:
                raise ServiceError("overloaded", "the gateway has too many open requests", retry_after=1.0)
            await self._app(scope, receive, reply.send)
        except ClientGone:
            reply.status = 499
        except asyncio.CancelledError:
            # The server's grace period is over. An open stream has already sent this error.
            await reply.fail(ServiceError("unavailable", "the gateway is stopping", retry_after=1.0))
            raise
        except Exception as error:
            _log_failure(error, reply, scope)
            helpful = await _with_suggestion(error, scope)
            await reply.fail(to_service_error(helpful), getattr(error, "headers", None))
        finally:
            reserved.close()
            self._requests.change(-counted)
            self._metrics.count_request(_route(scope), reply.status)


class _Reply:
    """Reply to one request: adds the request id, and records whether the response has started."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.status = 0
        scope.setdefault("state", {})["request_id"] = _request_id(scope)

    @property
    def request_id(self) -> str:
        """Returns the request's id. A handler may replace it by one that the body states."""
        return str(self._scope["state"]["request_id"])

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
        await self._send(message)

    async def fail(self, error: ServiceError, extra: dict[str, str] | None = None) -> None:
        if self.status:
            return  # the response has started, so a second one would corrupt it
        status, body, headers = error_reply(error, self._scope["path"], self.request_id)
        await json_response(body, status, headers | (extra or {}))(self._scope, self._receive, self.send)


def plain_path(path: str) -> str:
    """Returns the path without slashes at its end and without empty parts. Clients add them when they join a base URL
    and a route."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


async def _with_suggestion(error: Exception, scope: Scope) -> Exception:
    """Returns the error. For an unknown function, it is extended by a suggestion of the function that was meant."""
    if not isinstance(error, NoSuchFunction):
        return error
    of_functions = scope["path"].startswith(("/functions/", "/deploy/"))
    helpful: Exception = await scope["state"]["suggestions"].add_to(error, with_base=not of_functions)
    return helpful


def _request_id(scope: Scope) -> str:
    """Returns the caller's x-request-id if it is safe in headers and logs (SANE_ID), else a new id."""
    header = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    text: str = header.decode("latin-1")
    return text if SANE_ID.fullmatch(text) else f"req_{secrets.token_hex(12)}"


def _route(scope: Scope) -> str:
    return getattr(scope.get("endpoint"), "__name__", "unknown")


def _log_failure(error: Exception, reply: _Reply, scope: Scope) -> None:
    if is_unexpected(error):
        log.error("request failed", exc_info=error, extra={"request_id": reply.request_id, "route": _route(scope)})
    elif missing := exhausted_resource(error):
        # without the stack trace, since many requests fail for the same reason
        log.error(
            "a request failed, since this process is short of %s", missing, extra={"request_id": reply.request_id}
        )
    elif reply.status:
        log.warning(
            "a reply ended before its last byte: %s",
            error,
            extra={"request_id": reply.request_id, "route": _route(scope)},
        )
