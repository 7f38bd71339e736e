"""Codes of errors on /v1: OpenAI's where OpenAI has one for the case, else our own error types."""

from __future__ import annotations

import re

from cluster.errors import ServiceError

BY_TYPE = {
    "unauthenticated": "invalid_api_key",
    "rate_limited": "rate_limit_exceeded",
    "validation_failed": "invalid_value",
}
"""OpenAI's codes of error types. An error may state a narrower one (`openai_code`)."""

KINDS = {"int": "integer", "float": "decimal", "str": "string", "array": "array"}
"""OpenAI's names of JSON types, by those in messages of msgspec."""
_BOUND = re.compile(r"Expected `(\w+)`(?: of length)? ([<>])=? (\S+)")
_STARTS = {
    "Object contains unknown field": "unknown_parameter",
    "Object missing required field": "missing_required_parameter",
}


def openai_code(error: ServiceError) -> str:
    """Returns the error's code in replies of /v1."""
    return error.openai_code or BY_TYPE.get(error.type, error.type)


def code_of_mismatch(message: str) -> str:
    """Returns the code for a message of msgspec about a value that does not have its type."""
    for start, code in _STARTS.items():
        if message.startswith(start):
            return code
    bound = _BOUND.match(message)
    if bound is None or bound[1] not in KINDS:
        return "invalid_type" if ", got `" in message else "invalid_value"
    kind, is_most, limit = KINDS[bound[1]], bound[2] == "<", bound[3]
    if kind in ("string", "array"):
        if not is_most and limit == "1":
            return f"empty_{kind}"
        return f"{kind}_above_max_length" if is_most else f"{kind}_below_min_length"
    return f"{kind}_above_max_value" if is_most else f"{kind}_below_min_value"
