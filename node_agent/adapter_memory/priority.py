"""Urgency of loads."""

from __future__ import annotations

from enum import IntEnum


class Priority(IntEnum):
    """Urgency of a load; a lower number is more urgent."""

    REQUEST = 0
    ORDER = 1
    """prefetch that an operator asked for"""
    PREDICTED = 2
    """prefetch for a forecast call"""
