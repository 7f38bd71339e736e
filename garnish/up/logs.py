"""The log files of the processes under `garnish up`: `<state>/logs/NAME.log`, JSON lines, one generation kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAIL = 256 << 10
"""Bytes at a log's end that are looked at."""


def log_of(state: Path, name: str) -> Path:
    return state / "logs" / f"{name}.log"


def fresh_log(state: Path, name: str) -> Path:
    """The path of a log that is empty now; the one of the start before becomes NAME.log.1."""
    log = log_of(state, name)
    log.parent.mkdir(mode=0o700, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    log.touch(mode=0o600)
    return log


def times_ended(log: Path) -> int:
    """How often a node's supervisor saw one of its processes end by itself."""
    return sum(entry.get("message") == "child ended" for entry in _entries(log))


def last_problem(log: Path) -> str | None:
    """The last error that a process logged, in one line: a record's message or the end of a stack trace."""
    problem: str | None = None
    for line in _tail(log):
        entry = _parse(line)
        if entry is None:
            problem = line.strip() or problem
        elif entry.get("level") == "error":
            trace = str(entry.get("exception", "")).strip().splitlines()
            parts = [entry.get("message"), entry.get("reason"), *trace[-1:]]
            problem = ": ".join(str(part) for part in parts if part)
    return problem[:500] if problem else None


def _entries(log: Path) -> Iterator[dict[str, Any]]:
    return (entry for entry in map(_parse, _tail(log)) if entry is not None)


def _parse(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _tail(log: Path) -> list[str]:
    with log.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - TAIL))
        return stream.read(TAIL).decode(errors="replace").splitlines()
