"""Moments, as a person at a terminal reads them."""

from __future__ import annotations

from datetime import UTC, datetime


def shown_time(moment: float) -> str:
    """`2026-11-21T19:22:44Z`, of seconds since 1970."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
