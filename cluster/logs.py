"""Logging of every process to standard error: readable lines on a terminal, one JSON object per line elsewhere.

Logs never contain prompts, outputs or secrets. Values passed as `extra` become fields of the line.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from cluster.printable import printable

CAPACITY = "capacity"
"""Message of the log line in which a warm engine reports its capacity."""
CAN_NOT_START = " can't start"
"""End of the message of a log line whose `reason` says why a process can't start. Its later errors only follow."""
SETTING = "GARNISH_LOG"
"""Environment variable; `json` selects JSON on a terminal too."""
SERVERS = ("gunicorn.error", "uvicorn.error")
"""Loggers of the underlying servers. Their messages about a normal start repeat Garnish's own."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_SHOWN_APART = ("time", "level", "process", "logger", "message", "exception")
_LEVELS = {"warning": "WARN", "critical": "CRIT"}
_COLOURS = {"WARN": "\x1b[33m", "ERROR": "\x1b[31m", "CRIT": "\x1b[31m"}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_DIGEST = re.compile(r"[0-9a-f]{64}")
DIGEST_LETTERS = 12


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object on one line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Returns the fields of the log line, in order."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return line

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), default=str)


class ReadableLines(JsonLines):
    """Formats a record as a readable line: time, level, process, message, fields. A stack trace follows below."""

    def __init__(self, process: str, colour: bool) -> None:
        super().__init__(process)
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        return readable(self.fields(record), self._colour)


def readable(line: Mapping[str, Any], colour: bool) -> str:
    """Returns the fields of a JSON log line as a readable line. The time is UTC, without the date. `colour`: use
    terminal colours."""
    level = str(line.get("level", "")).upper()
    level = _LEVELS.get(level.lower(), level)
    moment = str(line.get("time", ""))[11:19]
    rest = " ".join(f"{key}={_shown(value)}" for key, value in line.items() if key not in _SHOWN_APART)
    process = line.get("process") or line.get("logger", "")
    text = f"{moment} {level:<5} {process}: {line.get('message', '')}{'  ' if rest else ''}"
    text, rest, trace = _one_line(text), _one_line(rest), printable(str(line.get("exception", "")))
    if colour:
        start = _COLOURS.get(level, "")
        text = f"{_DIM}{text[:8]}{_PLAIN}{start}{text[8:14]}{_PLAIN if start else ''}{text[14:]}"
        rest = f"{_DIM}{rest}{_PLAIN}" if rest else ""
    return "\n  ".join([text + rest, *trace.splitlines()])


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + " ".join(f"{key}={_shown(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"
    if not isinstance(value, str):
        return json.dumps(value, default=str)
    if _DIGEST.fullmatch(value):
        return value[:DIGEST_LETTERS]
    return json.dumps(value, ensure_ascii=False) if " " in value or not value else value


def _one_line(text: str) -> str:
    """Returns the text on one line, without control characters."""
    return printable(" ".join(text.splitlines()))


def wants_text(stream: TextIO) -> bool:
    """Returns whether log lines on this stream are readable ones rather than JSON."""
    return stream.isatty() and os.environ.get(SETTING) != "json"


def wants_colour(stream: TextIO) -> bool:
    """Returns whether log lines on this stream may have terminal colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def set_up_logging(process: str) -> None:
    """Sends this process's log to standard error, from level INFO on."""
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(process)], force=True)
    for name in SERVERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def log_handler(process: str) -> logging.Handler:
    """Returns the log handler for standard error, with readable lines or JSON."""
    handler = logging.StreamHandler(sys.stderr)
    text = wants_text(sys.stderr)
    handler.setFormatter(ReadableLines(process, wants_colour(sys.stderr)) if text else JsonLines(process))
    return handler
