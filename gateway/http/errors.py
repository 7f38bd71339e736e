"""Turns errors into replies: the gateway's own types, the registry's, Starlette's, and unexpected ones."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

from adapters import errors as adapter_errors
from cluster.descriptors import is_out_of_descriptors
from cluster.errors import ServiceError
from gateway.http.openai_codes import openai_code

STORE_RETRY_AFTER = 2.0
RESOURCE_RETRY_AFTER = 2.0
MAX_CAUSES = 8
INSPECTION_RETRY_AFTER = 5.0
FULL_RETRY_AFTER = 30.0
REGISTRY_FULL = "the registry can't be written to, because its disk is full or read-only"
MAX_MESSAGE = 1000
MAX_PARAM = 200
"""Maximum characters of an error's `param` and message in a reply. Both may quote the request, which may be a megabyte
long."""

AS_THEY_SAY: dict[type[Exception], tuple[str, float | None]] = {
    adapter_errors.NotFound: ("not_found", None),
    adapter_errors.Conflict: ("conflict", None),
    adapter_errors.PreconditionFailed: ("precondition_failed", None),
    adapter_errors.TooLarge: ("too_large", None),
    adapter_errors.InspectionBusy: ("overloaded", INSPECTION_RETRY_AFTER),
    adapter_errors.ArtifactPending: ("unavailable", STORE_RETRY_AFTER),
    adapter_errors.CorruptFunction: ("internal", None),
    adapter_errors.CorruptArtifact: ("internal", None),
}
"""Errors of the registry whose message is shown to the caller. Values are the error's type in the reply, and
Retry-After in seconds."""


class ClientGone(Exception):
    """The caller closed the connection, so its work ends and no reply is sent."""


def invalid(param: str | None, message: str, openai_code: str | None = None) -> ServiceError:
    """Returns a `validation_failed` error about the request's field `param`."""
    return ServiceError("validation_failed", message, param=param, openai_code=openai_code)


def no_room(what: str) -> ServiceError:
    """Returns the error of a request that would store something where nothing can be stored now. `what`: which disk."""
    advice = "nothing of this request was stored; send it again when the operator has made room"
    return ServiceError("insufficient_storage", f"{what}: {advice}", retry_after=FULL_RETRY_AFTER)


def to_service_error(error: BaseException) -> ServiceError:
    """Returns the error to show to the caller. Unexpected errors become `internal` without details."""
    match error:
        case ServiceError():
            return error
        case adapter_errors.InvalidAdapter():
            details = [msgspec.to_builtins(problem) for problem in error.problems]
            return ServiceError("validation_failed", f"the adapter is refused: {error}", details=details)
        case adapter_errors.InvalidRequest():
            return invalid(error.param, str(error))
        case adapter_errors.StoreFull():
            return no_room(REGISTRY_FULL)
        case adapter_errors.StoreUnavailable() if not isinstance(error, adapter_errors.CorruptFunction):
            missing = exhausted_resource(error)
            message = _short_of(missing) if missing else "the registry can't be reached now"
            return ServiceError("unavailable", message, retry_after=STORE_RETRY_AFTER)
        case adapter_errors.NotCallable():
            why = f"The model `{error.called[:100]}` does not exist or you do not have access to it."
            return ServiceError("not_found", str(error), openai_code="model_not_found", openai_message=why)
        case HTTPException():
            return _from_starlette(error)
    for kind, (error_type, retry_after) in AS_THEY_SAY.items():
        if isinstance(error, kind):
            return ServiceError(error_type, str(error), retry_after=retry_after)
    if missing := exhausted_resource(error):
        return ServiceError("unavailable", _short_of(missing), retry_after=RESOURCE_RETRY_AFTER)
    return ServiceError("internal", "an unexpected error; the operator finds it in the log by the request id")


def _short_of(resource: str) -> str:
    return f"the gateway is short of {resource}"


def exhausted_resource(error: BaseException | None) -> str:
    """Returns the resource of this process that an error says is exhausted; empty for other errors.

    Looks at the errors that caused it, too: libraries wrap a failed `socket()` or `open()` in errors of their own.
    """
    for _ in range(MAX_CAUSES):
        if isinstance(error, OSError) and is_out_of_descriptors(error):
            return "descriptors"
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return "memory"
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return "threads or memory"
        if error is None:
            return ""
        error = error.__cause__ or error.__context__
    return ""


def is_unexpected(error: BaseException) -> bool:
    """Returns whether the error is unexpected, so that its stack trace must be logged."""
    return to_service_error(error).type == "internal"


def _from_starlette(error: HTTPException) -> ServiceError:
    if error.status_code == 404:
        return ServiceError("not_found", str(error.detail), openai_code="unknown_url")
    if error.status_code == 405:
        return ServiceError("method_not_allowed", "the route exists, but not with this method")
    return ServiceError("invalid_request", str(error.detail))


def cut(text: str, max_characters: int) -> str:
    """Returns the text, cut to `max_characters` with `…` at the end if it is longer."""
    return text if len(text) <= max_characters else text[: max_characters - 1] + "…"


def native_body(error: ServiceError, request_id: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": error.type,
        "message": cut(error.message, MAX_MESSAGE),
        "param": error.param and cut(error.param, MAX_PARAM),
        "request_id": request_id,
    }
    if error.details is not None:
        body["details"] = error.details
    return {"error": body}


def openai_body(error: ServiceError, request_id: str) -> dict[str, Any]:
    """Returns the error body in OpenAI's format."""
    kind = {400: "invalid_request_error", 404: "invalid_request_error", 401: "authentication_error"}
    kind |= {403: "permission_error", 429: "rate_limit_error"}
    status = openai_status(error)
    message = f"{error.openai_message} ({error.message})" if error.openai_message else error.message
    return {
        "error": {
            "message": cut(message, MAX_MESSAGE),
            "type": kind.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": error.param and cut(error.param, MAX_PARAM),
            "code": openai_code(error),
            "request_id": request_id,
        }
    }


def openai_status(error: ServiceError) -> int:
    """Returns the HTTP status for OpenAI's clients, which expect 400 for any invalid content."""
    return 400 if error.type == "validation_failed" else error.status


def error_reply(error: ServiceError, path: str, request_id: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Returns the status, JSON body and extra headers of an error reply."""
    headers: dict[str, str] = {}
    if error.retry_seconds is not None:
        headers["retry-after"] = str(error.retry_seconds)
    if error.type == "unauthenticated":
        headers["www-authenticate"] = "Bearer"
    if path == "/v1" or path.startswith("/v1/"):
        return openai_status(error), openai_body(error, request_id), headers
    return error.status, native_body(error, request_id), headers
