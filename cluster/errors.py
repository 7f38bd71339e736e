"""Errors that cross an interface: between gateway and node, and between gateway and user (API.md's `error.type`)."""

from __future__ import annotations

import math
from typing import Any

STATUS = {
    "invalid_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "precondition_failed": 412,
    "too_large": 413,
    "unsupported_media_type": 415,
    "validation_failed": 422,
    "rate_limited": 429,
    "overloaded": 429,
    "head_too_large": 431,
    "cancelled": 499,
    "internal": 500,
    "node_failed": 502,
    "unavailable": 503,
    "timeout": 504,
    "insufficient_storage": 507,
}
"""HTTP status of each error type of the public API."""

RETRIED = (429, 502, 503, 507)
"""Statuses of errors that may pass by themselves."""


class ServiceError(Exception):
    """Failure whose type, message and details may be shown to the caller.

    `param` names the offending field, if there is one. `details` lists several problems. `retry_after`: seconds after
    which the caller may try again. Errors with a status in RETRIED always have a Retry-After (`retry_seconds`).
    `openai_code`: OpenAI's code of the case, if it is narrower than that of the type. `openai_message`: OpenAI's
    sentence about the case, which clients look for. Only replies of /v1 have them.
    """

    def __init__(
        self,
        type: str,
        message: str,
        *,
        param: str | None = None,
        details: list[dict[str, Any]] | None = None,
        retry_after: float | None = None,
        openai_code: str | None = None,
        openai_message: str = "",
    ) -> None:
        if type not in STATUS:
            raise ValueError(f"unknown error type {type!r}; known: {', '.join(STATUS)}")
        super().__init__(message)
        self.type = type
        self.message = message
        self.param = param
        self.details = details
        self.retry_after = retry_after
        self.openai_code = openai_code
        self.openai_message = openai_message

    @property
    def status(self) -> int:
        """HTTP status of the error's type."""
        return STATUS[self.type]

    @property
    def retry_seconds(self) -> int | None:
        """Value of the header Retry-After, in whole seconds, at least 1; None if the error does not pass by itself."""
        if self.status not in RETRIED:
            return None
        return max(1, math.ceil(self.retry_after or 1.0))
