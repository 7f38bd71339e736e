"""Reads the log files of the processes under `garnish up`, and makes a trace of the calls in the gateway's."""

from __future__ import annotations

import json
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from cluster.logs import CAPACITY, readable, wants_colour
from cluster.printable import printable
from garnish.errors import FrontDoorError
from gateway.calls.trace_log import CALL, Call

DIGEST_LETTERS = 16
MAX_LOG = 32 << 20
"""Bytes after which a log is begun anew; with the generation before it takes at most twice as many, and a little."""
TAIL = 256 << 10
"""Bytes at a log's end that are looked at."""
UNKNOWN = ""
"""The process of a line that does not say whose it is."""


class TraceLine(msgspec.Struct, frozen=True):
    """One call, as `garnish simulate` reads it (garnish.simulation.traces.read)."""

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


class Capacity(msgspec.Struct, frozen=True):
    """What a node is good for, as node_agent.performance.capacity writes it; that module loads torch."""

    device_adapters: dict[str, int]
    """By rank: how many adapters of all seven projections fit at once, if no others are there."""
    host_adapters: dict[str, int]
    tokens_per_second: dict[str, float] = {}
    """By number of callers, together; empty: not known."""
    device: str = ""
    dtype: str = ""


def log_of(state: Path, name: str) -> Path:
    return state / "logs" / f"{name}.log"


def fresh_log(state: Path, name: str) -> Path:
    """Returns the path of a log that is empty now; the log of the start before becomes NAME.log.1."""
    log = log_of(state, name)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    log.touch(mode=0o600)
    return log


def bound_log(log: Path, limit: int = MAX_LOG) -> None:
    """Begins a log anew that has grown beyond `limit` bytes; what it held becomes NAME.log.1.

    Its writers keep it open for appending, so it is emptied, not renamed: lines written within that moment are lost.
    """
    if log.stat().st_size > limit:
        shutil.copyfile(log, log.with_suffix(".log.1"))
        log.with_suffix(".log.1").chmod(0o600)
        with log.open("r+b") as stream:
            stream.truncate(0)


def capacity(log: Path) -> Capacity | None:
    """Returns what a node's engine logged that it is good for, the last time it got warm; None if it is not there."""
    found = None
    for entry in _entries(log):
        if entry.get("message") == CAPACITY:
            found = msgspec.convert(entry, Capacity)
    return found


def times_ended(log: Path) -> int:
    """Returns how often a node's supervisor saw one of its processes end by itself, as far as the log's last TAIL bytes
    tell."""
    return sum(entry.get("message") == "child ended" for entry in _entries(log))


def refuses_to_start(log: Path) -> bool:
    """Returns whether a node's engine logged that it can't start, for a reason that a further start does not change:
    a setting, for instance."""
    return any(entry.get("message") == "engine can't start" and entry.get("permanent") for entry in _entries(log))


def last_problem(log: Path, start: int = 0) -> str | None:
    """Returns the last error that a process logged, in one line: a record's message or the end of a stack trace. None
    without one.

    Only what stands after the byte `start` counts, where a process that began later wrote its first line.
    """
    return _read(_tail(log, start)).last


def end_reason(log: Path) -> str | None:
    """Returns the last error of that process of a node which ended last, as its supervisor tells in the node's log;
    None without one."""
    return _read(_tail(log)).ended


class _Problems:
    """What a log says went wrong; a process that is started again does not inherit the problem of the one before."""

    def __init__(self) -> None:
        self.last: str | None = None
        self.ended: str | None = None
        self._of: dict[str, str] = {}

    def note(self, process: str, problem: str) -> None:
        self.last = self._of[process] = problem[:500]

    def started(self, process: str) -> None:
        gone = {self._of.pop(process, None), self._of.pop(UNKNOWN, None)}
        if self.last in gone:
            self.last = None

    def end(self, process: str) -> None:
        self.ended = self._of.get(process) or self._of.get(UNKNOWN)


def _read(lines: list[str]) -> _Problems:
    problems = _Problems()
    for line in lines:
        entry = parse_entry(line)
        if entry is None:
            if line.strip():
                problems.note(UNKNOWN, line.strip())
        elif entry.get("message") == "child started":
            problems.started(str(entry.get("child")))
        elif entry.get("message") == "child ended":
            problems.end(str(entry.get("child")))
        elif entry.get("level") == "error":
            trace = str(entry.get("exception", "")).strip().splitlines()
            parts = [entry.get("message"), entry.get("reason"), *trace[-1:]]
            problems.note(str(entry.get("process", UNKNOWN)), ": ".join(str(part) for part in parts if part))
    return problems


def _entries(log: Path) -> Iterator[dict[str, Any]]:
    return (entry for entry in map(parse_entry, _tail(log)) if entry is not None)


def parse_entry(line: str) -> dict[str, Any] | None:
    """Returns the record in a line of a log; None for a line that is no JSON object."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _tail(log: Path, start: int = 0) -> list[str]:
    with log.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(start if start <= size else 0, size - TAIL))  # shorter than before: it was begun anew
        return stream.read(TAIL).decode(errors="replace").splitlines()
