"""Log lines: one JSON object each in a pipe, lines for people on a terminal, which no content can forge."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cluster.logs import JsonLines, ReadableLines, readable

SPEAK = """
import logging
from cluster.logs import set_up_logging
set_up_logging("api")
logging.getLogger("uvicorn.error").info("Started server process")
logging.getLogger("node").warning("late by %s", "much", extra={"seconds": 1.25})
"""


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("here", logging.WARNING, "file", 1, message, (), None)
    vars(made).update(extra)
    return made


def test_a_line_is_one_json_object_with_the_extra_fields() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failure = sys.exc_info()
    made = record("it is so\n\u2028", request="r1", where={"path": object})
    made.exc_info = failure
    line = JsonLines("api").format(made)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["process"], fields["level"], fields["logger"]) == ("api", "warning", "here")
    assert (fields["message"], fields["request"]) == ("it is so\n\u2028", "r1")
    assert "ValueError" in fields["exception"]


def test_a_line_for_people() -> None:
    call = {"tenant": "acme", "digest": "ab" * 32, "rank": 8}
    line = {"time": "2026-11-23T18:40:42.784Z", "level": "info", "process": "gateway", "logger": "gateway.calls"}
    line |= {"message": "call ended", "invocation": "inv_1", "call": call, "after": 0.123456789, "why": "no room"}
    fields = 'invocation=inv_1 call={tenant=acme digest=abababababab rank=8} after=0.123457 why="no room"'
    assert readable(line, colour=False) == f"18:40:42 INFO  gateway: call ended  {fields}"
    coloured = readable(line | {"level": "error"}, colour=True)
    assert coloured.startswith("\x1b[2m18:40:42\x1b[0m\x1b[31m ERROR\x1b[0m gateway: call ended")
    trace = readable(line | {"exception": "Traceback:\n  here\nValueError: x"}, colour=False).splitlines()
    assert trace[1:] == ["  Traceback:", "    here", "  ValueError: x"]


@given(st.text(), st.text(), st.sampled_from(["a", "message", "level", "time"]))
def test_nobody_forges_a_line_or_moves_the_cursor(message: str, value: str, key: str) -> None:
    made = readable({"time": "2026-11-23T18:40:42.784Z", "level": "info", "message": message, key: value}, False)
    assert len(made.splitlines()) == 1
    assert not set(made) & {"\x1b", "\r", "\x07", "\x9b"}
    assert len(ReadableLines("p", colour=False).format(record("x", given=value)).splitlines()) == 1


def spoken(terminal: bool, **environment: str) -> str:
    """What a process logs on a terminal, or into a pipe."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "GARNISH_LOG")}
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", SPEAK]
    root = str(Path(__file__).parents[2])
    whole = {**kept, "TERM": "xterm", "PYTHONPATH": root, **environment}
    subprocess.run(command, stderr=theirs, env=whole, check=True, timeout=60)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    return text


def test_people_read_a_terminal_and_programs_a_pipe() -> None:
    for piped in (spoken(terminal=False), spoken(terminal=True, GARNISH_LOG="json")):
        (line,) = piped.splitlines()
        fields = json.loads(line)
        assert (fields["process"], fields["message"], fields["seconds"]) == ("api", "late by much", 1.25)
    told = "api: late by much  "
    assert "\x1b[33m WARN \x1b[0m " + told in spoken(terminal=True)
    plain = spoken(terminal=True, NO_COLOR="1")
    assert "\x1b" not in plain and plain.split(" ", 1)[1] == f"WARN  {told}seconds=1.25\r\n"
