"""Redis URLs, which may contain a password: they are checked without a connection, and shown without the password."""

from __future__ import annotations

from urllib.parse import urlsplit

EXPECTED = "expected redis://HOST:PORT/DATABASE, rediss:// for TLS, or unix:///PATH"


def url_problem(url: str) -> str:
    """Returns what is wrong with the URL, without quoting any of it; empty when it is valid."""
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
    """Returns the URL without user, password and options, as logs may show it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
