"""Parses and formats sizes, rates and durations, such as `4GiB`, `200MB/s` and `15m`."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from fractions import Fraction

BYTES = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


BYTES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)", re.ASCII)


def parse_bytes(value: object) -> int:
    """Returns the number of bytes in a text such as `4GiB` or `200MB`, or a number above 0.

    Raises ValueError that says what was expected.
    """
    return math.ceil(_quantity(value, BYTES, "a size such as 512MiB, 4GiB or 2GB"))


def parse_rate(value: object) -> float:
    """Returns the bytes per second of a rate such as `1GB/s`. Raises ValueError that says what was expected."""
    expected = "a rate such as 200MB/s or 1GB/s"
    if not isinstance(value, str) or not value.endswith("/s"):
        raise ValueError(f"expected {expected}, found {value!r}")
    return float(_quantity(value.removesuffix("/s"), BYTES, expected))


def parse_seconds(value: object) -> float:
    """Returns the seconds in a text such as `15m` or `250ms`, or a number above 0.

    Raises ValueError that says what was expected.
    """
    return float(_quantity(value, SECONDS, "a duration such as 30s, 15m or 2h"))


def parse_whole_seconds(value: object) -> int:
    """Returns seconds as `parse_seconds` does. Also raises ValueError if they are not a whole number."""
    seconds = parse_seconds(value)
    if not seconds.is_integer():
        raise ValueError(f"expected whole seconds, found {value!r}")
    return int(seconds)


def format_bytes(count: int) -> str:
    """Returns a number of bytes as text such as `2.3 MiB`, with at most three digits."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while round(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f} {units[0]}" if units[0] != "B" and size < 99.95 else f"{size:.0f} {units[0]}"


def _quantity(value: object, units: dict[str, float] | dict[str, int], expected: str) -> Fraction:
    """Returns the exact quantity in the base unit, whose factor in `units` is 1.

    A float would be wrong by some bytes for large sizes. Raises ValueError with the text `expected`.
    """
    text = str(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"expected {expected}, found {value!r}")
    amount = Fraction(match[1]) * Fraction(str(units[match[2]]))
    if not 0 < amount < 2**62:
        raise ValueError(f"expected {expected}, above 0 and below 4 exbibytes, found {value!r}")
    return amount


def format_time(moment: float) -> str:
    """Returns a Unix time as text such as `2026-11-21T19:22:44Z`."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
