"""Reads the log files of the processes under `garnish up`, and makes a trace of the calls in the gateway's."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from cluster.logs import readable, wants_colour
from cluster.printable import printable
from garnish.errors import FrontDoorError
from garnish.up.logs import log_of, parse_entry
from gateway.calls.trace_log import CALL, Call

DIGEST_LETTERS = 16


class TraceLine(msgspec.Struct, frozen=True):
    """One call, as `garnish simulate` reads it (garnish.simulation.traces.own)."""

    at: float
    """Seconds since the first call."""
    tenant: str
    function: str
    """The beginning of the adapter's digest; empty for the base alone."""
    rank: int
    prompt_tokens: int
    output_tokens: int
    bytes: int
    """Of the adapter."""

    def line(self) -> str:
        return msgspec.json.encode(self).decode() + "\n"


def log_names(state: Path) -> list[str]:
    """Returns the names of the logs in the state directory. Raises FrontDoorError."""
    names = sorted(file.stem for file in (state / "logs").glob("*.log"))
    if not names:
        raise FrontDoorError(f"there are no logs in {state / 'logs'}; is {state} the service's state directory?")
    return names


def last_lines(state: Path, name: str, count: int) -> list[str]:
    """Returns the last `count` lines of the log and of the generation before it. Raises FrontDoorError."""
    known = log_names(state)
    if name not in known:
        raise FrontDoorError(f"there is no log of {name!r} in {state / 'logs'}; there are: {', '.join(known)}")
    return list(deque(_lines(log_of(state, name)), maxlen=count))


def for_people(line: str) -> str:
    """Returns a JSON line as it is read on this process's standard output; anything else without control characters."""
    entry = parse_entry(line)
    return printable(line) if entry is None else readable(entry, wants_colour(sys.stdout))


def trace_lines(state: Path) -> Iterator[TraceLine]:
    """Yields the calls that ended well, by the time at which they came; tenants are numbered as they first appear.
    Raises FrontDoorError when there are none."""
    log_names(state)
    calls = sorted(_calls(log_of(state, "gateway")), key=lambda call: call.at)
    if not calls:
        raise FrontDoorError(f"the gateway's log in {state / 'logs'} holds no calls that ended well")
    tenants: dict[str, str] = {}
    for call in calls:
        yield TraceLine(
            at=round(call.at - calls[0].at, 6),
            tenant=tenants.setdefault(call.tenant, f"t{len(tenants) + 1}"),
            function=call.digest[:DIGEST_LETTERS],
            rank=call.rank,
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.output_tokens,
            bytes=call.bytes,
        )


def _calls(log: Path) -> Iterator[Call]:
    """Yields the calls that the log holds. Lines of other kinds, and lines that were cut when the log was begun anew,
    are passed over."""
    for text in _lines(log):
        if f'"{CALL}"' not in text:
            continue
        try:
            entry = json.loads(text)
            yield msgspec.convert(entry["call"], Call)
        except (ValueError, KeyError, TypeError, msgspec.ValidationError):
            continue


def _lines(log: Path) -> Iterator[str]:
    files = [file for file in (log.with_suffix(".log.1"), log) if file.exists()]
    return chain.from_iterable(_of(file) for file in files)


def _of(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            yield line.rstrip("\n")
