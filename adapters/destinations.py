"""Destination for the result of an asynchronous call: a webhook, or another function of the tenant."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from adapters.errors import InvalidRequest
from adapters.names import is_name


class Destination(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Destination of a result; exactly one of the fields is set."""

    webhook: Annotated[str, Meta(max_length=2000)] | None = None
    """URL (http or https) without user name or password."""
    function: Annotated[str, Meta(max_length=130)] | None = None
    """Function of the tenant as `name`, `name:alias` or `name:version`."""


def check_destination(destination: Destination | None, field: str) -> None:
    """Raises InvalidRequest, which names the field, for a malformed destination. Does not check that the function or
    the host exists."""
    if destination is None:
        return
    if (destination.webhook is None) == (destination.function is None):
        raise InvalidRequest(field, f"{field}: state exactly one of webhook and function")
    if destination.function is not None:
        name, _, qualifier = destination.function.partition(":")
        if not is_name(name) or (qualifier and not is_name(qualifier)):
            raise InvalidRequest(f"{field}.function", f"{field}.function: not a function's name")
    elif not _is_url(destination.webhook or ""):
        raise InvalidRequest(f"{field}.webhook", f"{field}.webhook: not an http or https URL without user and password")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        if parts.port == 0:
            return False
    except ValueError:  # also for what is no port
        return False
    plain = text.isascii() and text.isprintable() and " " not in text
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
