"""Reads and rotates the log files of `garnish up`, and extracts the trace of calls from the gateway's log.

A process logs JSON lines to `<state>/logs/NAME.log`. After a rotation the previous content is in NAME.log.1.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from cluster.logs import CAN_NOT_START, CAPACITY, readable, wants_colour
from cluster.printable import printable
from garnish.errors import FrontDoorError
from gateway.calls.trace_log import CALL, Call

DIGEST_LETTERS = 16
MAX_LOG_BYTES = 32 << 20
TAIL_BYTES = 256 << 10
UNKNOWN = ""
"""Key in `_Problems` for log lines that name no process."""


class TraceLine(msgspec.Struct, frozen=True):
    """A call in the format that `garnish simulate` reads (garnish.simulation.traces.read)."""

    at: float
    tenant: str
    function: str
    rank: int
    prompt_tokens: int
    output_tokens: int
    bytes: int

    def line(self) -> str:
        return msgspec.json.encode(self).decode() + "\n"


def log_names(state: Path) -> list[str]:
    """Returns the names of the logs in the state directory. Raises FrontDoorError."""
    names = sorted(file.stem for file in (state / "logs").glob("*.log"))
    if not names:
        raise FrontDoorError(f"there are no logs in {state / 'logs'}; is {state} the service's state directory?")
    return names


def last_lines(state: Path, name: str, count: int) -> list[str]:
    """Returns the last `count` lines of NAME.log.1 and NAME.log together. Raises FrontDoorError."""
    names = log_names(state)
    if name not in names:
        raise FrontDoorError(f"there is no log of {name!r} in {state / 'logs'}; there are: {', '.join(names)}")
    return list(deque(_lines(log_of(state, name)), maxlen=count))


def for_people(line: str) -> str:
    """Returns a JSON line as readable text, and any other line without control characters."""
    entry = parse_entry(line)
    return printable(line) if entry is None else readable(entry, wants_colour(sys.stdout))


def trace_lines(state: Path) -> Iterator[TraceLine]:
    """Yields the successful calls by arrival. Tenants are numbered in the order of their first call.

    Raises FrontDoorError if there are none.
    """
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
    """Yields the calls in the log. Skips other lines, and lines that were truncated by a rotation."""
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
    """Capacity of a node, as logged by node_agent.performance.capacity.

    The class is defined here because that module imports torch.
    """

    device_adapters: dict[str, int]
    """number of adapters that fit on the device, by rank; such an adapter targets all seven projections"""
    host_adapters: dict[str, int]
    tokens_per_second: dict[str, float] = {}
    """tokens per second of all callers together, by number of callers; empty if not known"""
    device: str = ""
    dtype: str = ""


def log_of(state: Path, name: str) -> Path:
    return state / "logs" / f"{name}.log"


def fresh_log(state: Path, name: str) -> Path:
    """Creates an empty log and returns its path; the previous log becomes NAME.log.1."""
    log = log_of(state, name)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    log.touch(mode=0o600)
    return log


def bound_log(log: Path, limit: int = MAX_LOG_BYTES) -> None:
    """Rotates a log of more than `limit` bytes: its content becomes NAME.log.1.

    Writers have the log open for appending, so the file is truncated, not renamed. Lines written meanwhile are lost. On
    a full disk the earlier lines are lost, too; on a read-only one nothing is done.
    """
    with suppress(OSError):
        if log.stat().st_size <= limit:
            return
        earlier = log.with_suffix(".log.1")
        try:
            shutil.copyfile(log, earlier)
            earlier.chmod(0o600)
        except OSError:
            earlier.unlink(missing_ok=True)  # half of it would take the room that is wanted
        with log.open("r+b") as stream:
            stream.truncate(0)


def capacity(log: Path) -> Capacity | None:
    """Returns the capacity that a node's engine logged when it last became ready, or None if the log has none."""
    reported = None
    for entry in _entries(log):
        if entry.get("message") == CAPACITY:
            reported = msgspec.convert(entry, Capacity)
    return reported


def times_ended(log: Path) -> int:
    """Returns the number of exits of processes that a node's supervisor logged, in the log's last TAIL_BYTES."""
    return sum(entry.get("message") == "child ended" for entry in _entries(log))


def refuses_to_start(log: Path) -> bool:
    """Returns True if a node's engine logged that it can't start for a permanent reason, such as a setting."""
    return any(entry.get("message") == "engine can't start" and entry.get("permanent") for entry in _entries(log))


def last_problem(log: Path, start: int = 0) -> str | None:
    """Returns the last error in the log as one line, or None if there is none.

    The error is a record's message, with its exception, or a line that is not JSON. Only lines after the byte offset
    `start` count; it is the log's size when the process started.
    """
    return _read(_tail(log, start)).last


def end_reason(log: Path) -> str | None:
    """Returns the last error of the node's process that was the last to end, or None if there is none."""
    return _read(_tail(log)).ended


class _Problems:
    """Last problem of each process in a log. A restart of a process clears its problem.

    After the reason why a process can't start, its later problems only follow from that, and are not kept.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self.ended: str | None = None
        self._of: dict[str, str] = {}
        self._refusing = set[str]()
        """Processes that have said why they can't start."""

    def record(self, process: str, problem: str, *, is_refusal: bool = False) -> None:
        if process in self._refusing and not is_refusal:
            return
        if is_refusal:
            self._refusing.add(process)
        self.last = self._of[process] = problem[:500]

    def started(self, process: str) -> None:
        self._refusing -= {process, UNKNOWN}
        former = {self._of.pop(process, None), self._of.pop(UNKNOWN, None)}
        if self.last in former:
            self.last = None

    def end(self, process: str) -> None:
        self.ended = self._of.get(process) or self._of.get(UNKNOWN)


def _read(lines: list[str]) -> _Problems:
    problems = _Problems()
    for line in lines:
        entry = parse_entry(line)
        if entry is None:
            if line.strip():
                problems.record(UNKNOWN, line.strip())
        elif entry.get("message") == "child started":
            problems.started(str(entry.get("child")))
        elif entry.get("message") == "child ended":
            problems.end(str(entry.get("child")))
        elif entry.get("level") == "error":
            trace = str(entry.get("exception", "")).strip().splitlines()
            parts = [entry.get("message"), entry.get("reason"), *trace[-1:]]
            problem, refusal = ": ".join(str(part) for part in parts if part), str(entry.get("message"))
            problems.record(str(entry.get("process", UNKNOWN)), problem, is_refusal=refusal.endswith(CAN_NOT_START))
    return problems


def _entries(log: Path) -> Iterator[dict[str, Any]]:
    return (entry for entry in map(parse_entry, _tail(log)) if entry is not None)


def parse_entry(line: str) -> dict[str, Any] | None:
    """Returns the record in a log line, or None if the line is not a JSON object."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _tail(log: Path, start: int = 0) -> list[str]:
    with log.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(start if start <= size else 0, size - TAIL_BYTES))  # size < start: the log was truncated
        return stream.read(TAIL_BYTES).decode(errors="replace").splitlines()
