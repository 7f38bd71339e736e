"""Hours as they are named in the registry: UTC, `2026-11-21T17`."""

from __future__ import annotations

from datetime import UTC, datetime

HOUR = 3600
FORMAT = "%Y-%m-%dT%H"


def hour_name(seconds: float) -> str:
    """The hour that the Unix time lies in."""
    return datetime.fromtimestamp(seconds // HOUR * HOUR, UTC).strftime(FORMAT)


def hour_start(name: str) -> int:
    """Unix time of an hour's first second. Raises ValueError for other texts."""
    start = datetime.strptime(name, FORMAT).replace(tzinfo=UTC)
    if start.strftime(FORMAT) != name:
        raise ValueError(f"{name!r} is no hour")
    return int(start.timestamp())
