"""Calls of batches, answered by the handlers of their routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from gateway.batches.lines import Line
from gateway.batches.messages import Endpoint
from gateway.batches.replies import Answer, LineReply
from gateway.calls.request import background_request
from gateway.http.bodies import parse_json
from gateway.http.errors import error_reply, is_unexpected, to_service_error
from gateway.http.stopwatch import Stopwatch

Handler = Callable[[Request, str, Stopwatch], Awaitable[ASGIApp]]
"""Handler of a route that answers one call. It gets the request, the tenant, and the call's stopwatch."""
log = logging.getLogger("gateway")


async def answer_line(
    handlers: Mapping[Endpoint, Handler], tenant: str, endpoint: Endpoint, line: Line, request_id: str
) -> Answer:
    """Returns the route's answer to the line's body. The call runs in spare capacity."""
    try:
        path, body = (endpoint, bytes(line.body)) if endpoint != "/invoke" else _invoke_call(line)
        request = background_request(request_id, path, body)
        response = await handlers[endpoint](request, tenant, Stopwatch())
        assert isinstance(response, Response)  # streamed calls are refused when the file is read
        return Answer(LineReply(200, bytes(response.body), request_id))
    except Exception as error:  # all errors become replies, as at the boundary
        if is_unexpected(error):
            log.error("a call of a batch failed", exc_info=error, extra={"request_id": request_id})
        failure = to_service_error(error)
        status, content, _ = error_reply(failure, endpoint, request_id)
        return Answer(LineReply(status, msgspec.json.encode(content), request_id), failure.type, failure.retry_after)


def _invoke_call(line: Line) -> tuple[str, bytes]:
    """Returns the path and the body of the line's invocation. Raises ServiceError."""
    fields = parse_json(bytes(line.body))
    return f"/invoke/{fields.pop('model')}", msgspec.json.encode(fields)
