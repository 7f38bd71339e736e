"""Names of hours in the registry, in UTC: `2026-11-21T17`."""

from __future__ import annotations

from datetime import UTC, datetime

HOUR = 3600
FORMAT = "%Y-%m-%dT%H"


def hour_name(seconds: float) -> str:
    """Returns the name of the hour that contains a Unix time."""
    return datetime.fromtimestamp(seconds // HOUR * HOUR, UTC).strftime(FORMAT)


def hour_start(name: str) -> int:
    """Returns the Unix time at which the hour begins. Raises ValueError if `name` is no hour's name."""
    start = datetime.strptime(name, FORMAT).replace(tzinfo=UTC)
    if start.strftime(FORMAT) != name:
        raise ValueError(f"{name!r} is not an hour")
    return int(start.timestamp())
