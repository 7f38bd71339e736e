"""Moments, as a person at a terminal reads them."""

from __future__ import annotations

from datetime import UTC, datetime


def shown_time(moment: float) -> str:
    """Returns a moment, in seconds since 1970, as `2026-11-21T19:22:44Z`."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
