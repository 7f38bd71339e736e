"""Warm windows: periods, set in a function's policy, in which its adapter is loaded before calls come."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec
from cronsim import CronSim, CronSimError
from msgspec import Meta

FIELDS = 5
"""Number of fields of a cron expression: minute, hour, day of the month, month, day of the week."""
MAX_WINDOWS = 8
"""Maximum number of windows of one function."""
MAX_SECONDS = 7 * 24 * 3600
MAX_COPIES = 16


class WarmWindow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Window that opens at each time of `cron` (UTC) and lasts `for` seconds, with `copies` copies on different
    nodes."""

    cron: Annotated[str, Meta(min_length=9, max_length=100)]
    seconds: Annotated[int, Meta(ge=60, le=MAX_SECONDS)] = msgspec.field(name="for")
    copies: Annotated[int, Meta(ge=1, le=MAX_COPIES)] = 1


class CronProblem(ValueError):
    """A cron expression is invalid. The message says why."""


def window_state(window: WarmWindow, now: float) -> tuple[bool, float]:
    """Returns whether the window is open at `now`, and a time until which that does not change. Both times are Unix
    times. Raises CronProblem."""
    begin = _next_time(window.cron, datetime.fromtimestamp(now, UTC) - timedelta(seconds=window.seconds))
    return (True, begin + window.seconds) if begin <= now else (False, begin)


def _next_time(cron: str, after: datetime) -> float:
    """Returns the first Unix time after `after` that matches the expression `cron`. Raises CronProblem."""
    if len(cron.split()) != FIELDS:
        example = "0 9 * * 1-5 is 9:00 UTC from Monday to Friday"
        raise CronProblem(f"expected minute, hour, day of the month, month and day of the week: {example}")
    try:
        return next(CronSim(cron, after)).timestamp()
    except CronSimError as error:
        raise CronProblem(str(error)) from None
    except StopIteration:
        raise CronProblem("there is no such time in the next years") from None
