"""Addresses of a Redis, which may hold a password: checked without a connection, and shown without it."""

from __future__ import annotations

from urllib.parse import urlsplit

EXPECTED = "expected redis://HOST:PORT/DATABASE, rediss:// for TLS, or unix:///PATH"


def url_problem(url: str) -> str:
    """Returns what is wrong with the address, without quoting any of it; empty when nothing is."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  (raises when it is no number)
    except ValueError:
        return EXPECTED
    if parts.scheme == "unix":
        return "" if parts.path else EXPECTED
    database = parts.path.strip("/")
    right = parts.scheme in ("redis", "rediss") and parts.hostname and (not database or database.isdecimal())
    return "" if right else EXPECTED


def shown_url(url: str) -> str:
    """Returns the URL without user, password and options."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
