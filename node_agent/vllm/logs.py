"""Logs of a node that drives vLLM: records and lines of vLLM and of its processes, in the node's own format.

vLLM's loggers have no handlers of their own here, so their records reach the node's, with their levels. What vLLM's
processes print becomes a record for each line. Lines that C++ libraries write to the descriptors stay as they are.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import TextIO

from cluster.logs import set_up_logging

ENVIRONMENT = {"VLLM_CONFIGURE_LOGGING": "0", "TQDM_DISABLE": "1"}
"""Settings by which vLLM leaves logging to us, and libraries print no progress bars."""
NO_NOTES = ("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
"""Setting by which Python's own process that cleans up after killed ones prints nothing."""
UNSET = ("VLLM_LOGGING_CONFIG_PATH", "PROMETHEUS_MULTIPROC_DIR")
"""Settings that a node does without: vLLM refuses the first where it leaves logging to us; the second shares metrics
between processes, and vLLM's are all in one."""
LEVEL_SETTING = "VLLM_LOGGING_LEVEL"
CALLERS_VALUES = "vllm.logging_utils.dump_input"
"""Logger of vLLM that writes what callers sent, after a step that failed."""
SECRET_NAME = re.compile(r"secret|password|credential|access_?key|_key$|(^|_)token$", re.IGNORECASE)
MIN_SECRET = 8
"""Minimum characters of a value that is hidden. Shorter ones (`1`, `false`) are settings."""
HIDDEN = "***"
ENDING = re.compile(r"(Process \S+:|Exception in thread .+:|Traceback \(most recent call last\):)\n")
"""First line of the stack trace of an exception that ends a process or a thread."""
LEVEL = re.compile(r"\[?([WEF])\d{4} ")
"""Beginning of a printed line that names a level, as torch's do."""
LEVELS = {"W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
MAX_TRACE = 1 << 16
"""Maximum characters of one stack trace."""


def set_up_environment() -> None:
    """Sets the environment of this process, and so of vLLM's. Call it before vLLM is imported."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault(*NO_NOTES)
    for name in UNSET:
        os.environ.pop(name, None)


def take_logs(vllm: str = "", process: str = "engine") -> None:
    """Sends all logs of this process, and what it prints, to standard error in the node's format. `vllm`: name of this
    process in vLLM; empty: vLLM has not started it. `process`: name of the node's process that it belongs to."""
    set_up_logging(process)
    (handler,) = logging.getLogger().handlers
    assert handler.formatter is not None  # set by set_up_logging
    handler.setFormatter(_Hiding(handler.formatter, secrets_in(os.environ)))
    logged = _LoggedExceptions(vllm)
    handler.addFilter(logged)
    level = os.environ.get(LEVEL_SETTING, "INFO").upper()
    logging.getLogger("vllm").setLevel(level if level in logging.getLevelNamesMapping() else "INFO")
    logging.getLogger(CALLERS_VALUES).disabled = True
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # else a line that can't be written, on a full disk, would be logged without end
    sys.stdout, sys.stderr = PrintedLines(sys.stdout, logged), PrintedLines(sys.stderr, logged)


def secrets_in(environment: Mapping[str, str]) -> list[str]:
    """Returns the values of variables whose names say that they are secret, the longest first."""
    secrets = {value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= MIN_SECRET}
    return sorted(secrets, key=len, reverse=True)


class _Hiding(logging.Formatter):
    """Formatter that hides secret values in the lines of another one."""

    def __init__(self, inner: logging.Formatter, secrets: list[str]) -> None:
        super().__init__()
        self._inner, self._secrets = inner, secrets

    def format(self, record: logging.LogRecord) -> str:
        line = self._inner.format(record)
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        return line


class _LoggedExceptions(logging.Filter):
    """Filter that names vLLM's process in each record, and keeps the last exception that was logged."""

    def __init__(self, vllm: str) -> None:
        super().__init__()
        self._vllm = vllm
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if self._vllm:
            record.vllm = self._vllm
        if record.exc_info and record.exc_info[1] is not None:
            self.last = "".join(traceback.format_exception_only(record.exc_info[1])).strip()
        return True


class PrintedLines(io.TextIOBase):
    """Text stream that logs each line, without progress bars, which begin with a carriage return. A stack trace is one
    record, and is left out if vLLM has just logged the same exception."""

    def __init__(self, stream: TextIO, logged: _LoggedExceptions) -> None:
        """`stream`: the stream whose place it takes, which is not written to."""
        self._stream, self._logged = stream, logged
        self._text = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            self._text += text
            while not ENDING.match(self._text) and "\n" in self._text:
                line, _, self._text = self._text.partition("\n")
                if line.strip() and not line.startswith("\r"):
                    level = LEVEL.match(line)
                    _log.log(LEVELS[level[1]] if level else logging.INFO, line)
            if len(self._text) > MAX_TRACE:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Logs a stack trace, which ends with a flush as printed by Python."""
        with self._lock:
            if not ENDING.match(self._text):
                return
            trace, self._text = self._text, ""
            if not self._logged.last or not trace.rstrip().endswith(self._logged.last):
                _log.error("an exception was not caught", extra={"exception": trace.rstrip()})

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"


_log = logging.getLogger("printed")
