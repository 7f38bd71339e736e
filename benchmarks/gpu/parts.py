"""Parts of a study on a GPU: each has a share of the time; what it could not do, or how it failed, is in the report.

A GPU may be lent for minutes, and any part may find a bug that no other host can show: so parts come in order of worth,
and each one's rows are handed on as soon as it ends.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Rows = list[dict[str, Any]]
Part = Callable[[float], Iterator[dict[str, Any]]]
"""(until when, by time.monotonic) -> its rows. Raises Skipped."""
MAX_TEXT = 3000


class Skipped(Exception):
    """Raised by a part that lacks what it needs; the message names it."""


def run_parts(
    parts: Mapping[str, Part], shares: Mapping[str, float], seconds: float, done: Callable[[Rows], None]
) -> Rows:
    """Runs the parts in turn. `shares`, relative to each other (1 where there is none), divide the time; what a part
    leaves goes to the next ones. `done` gets all rows so far after every part."""
    rows: Rows = []
    total, share, began = sum(shares.get(name, 1.0) for name in parts) or 1.0, 0.0, time.monotonic()
    for name, part in parts.items():
        share += shares.get(name, 1.0)
        entered = time.monotonic()
        try:
            for row in part(began + seconds * share / total):
                rows.append({"part": name, **row})
        except Skipped as why:
            rows.append({"part": name, "skipped": str(why)})
        except Exception:  # the border of a part: the others still have something to say
            rows.append({"part": name, "failed": traceback.format_exc()[-MAX_TEXT:]})
        rows.append({"part": name, "took_s": round(time.monotonic() - entered, 1)})
        done(rows)
    return rows


def failures(document: Mapping[str, Any]) -> list[str]:
    """Returns the failures of a run: parts that failed, and wrong results."""
    problems = [f"{row['part']}: {row['failed']}" for row in document["rows"] if "failed" in row]
    problems += [f"{row['part']}: {row['wrong']}" for row in document["rows"] if "wrong" in row]
    mismatches = document["figures"].get("mismatches")
    return problems + ([f"{mismatches:.0f} answers differ from PEFT's"] if mismatches else [])
