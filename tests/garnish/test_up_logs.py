"""Why a process ended, as read from the logs that gateway and node really write."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import pytest

from cluster.logs import JsonLines
from garnish.errors import StartError
from garnish.logs import bound_log, capacity, end_reason, fresh_log, last_problem, times_ended
from garnish.screen import Screen
from garnish.up.greeting import capacity_lines
from garnish.up.run import MAX_CRASHES, NO_REASON, Ends, check_nodes


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return fresh_log(tmp_path, "node-0")


def say(log: Path, process: str, message: str, **extra: object) -> None:
    line = {"level": "error" if extra.pop("error", False) else "info", "process": process, "message": message} | extra
    with log.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def test_the_end_of_a_stack_trace_is_read(log: Path) -> None:
    logger, handler = logging.Logger("x"), logging.FileHandler(log)
    handler.setFormatter(JsonLines("engine"))
    logger.addHandler(handler)
    try:
        raise OSError("no space left")
    except OSError:
        logger.exception("can't go on")
    handler.close()
    assert last_problem(log) == "can't go on: OSError: no space left"


def test_lines_from_before_the_start_are_no_reason(log: Path) -> None:
    say(log, "api", "old", error=True)
    start = log.stat().st_size
    assert last_problem(log, start) is None
    say(log, "api", "new", error=True, reason="why")
    assert last_problem(log, start) == "new: why"
    with log.open("a") as stream:
        stream.write("Segmentation fault\n\n")
    assert last_problem(log, start) == "Segmentation fault"


def test_each_process_of_a_node_has_its_own_reason(log: Path) -> None:
    say(log, "supervisor", "child started", child="engine")
    say(log, "engine", "engine can't start", error=True, reason="no weights")
    say(log, "api", "engine did not end a request", error=True)
    say(log, "supervisor", "child ended", child="engine")
    assert (end_reason(log), times_ended(log)) == ("engine can't start: no weights", 1)
    say(log, "supervisor", "child started", child="engine")
    assert end_reason(log) == "engine can't start: no weights"  # still why it ended last
    assert last_problem(log) == "engine did not end a request"
    say(log, "supervisor", "child ended", child="engine")
    assert (end_reason(log), times_ended(log)) == (None, 2)


def test_what_follows_a_reason_is_none(log: Path) -> None:
    """As a gateway whose worker can't start logs it."""
    say(log, "gateway", "gateway can't start", error=True, reason="no tokenizer.json")
    say(log, "gateway", "Application startup failed. Exiting.", error=True)
    say(log, "gateway", "Reason: Worker failed to boot.", error=True)
    assert last_problem(log) == "gateway can't start: no tokenizer.json"
    say(log, "supervisor", "child started", child="gateway")
    say(log, "gateway", "another", error=True)
    assert last_problem(log) == "another"


@pytest.mark.parametrize("permanent", [True, False])
def test_a_start_ends_at_a_refusal_or_after_three_crashes(log: Path, permanent: bool) -> None:
    say(log, "engine", "engine can't start", error=True, reason="out of memory", permanent=permanent)
    for number in range(1, MAX_CRASHES + 1):
        say(log, "supervisor", "child ended", child="engine")
        if permanent or number == MAX_CRASHES:
            with pytest.raises(StartError, match=r"can't start: engine can't start: out of memory \(log: "):
                check_nodes([log])
        else:
            check_nodes([log])


def test_a_node_that_crashes_without_a_reason_ends_a_start(log: Path) -> None:
    for _ in range(MAX_CRASHES):
        check_nodes([log])
        say(log, "supervisor", "child started", child="engine")
        say(log, "supervisor", "child ended", child="engine")
    with pytest.raises(StartError, match="no reason was logged"):
        check_nodes([log])


def test_a_second_end_is_not_blamed_on_the_first_ones_error(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = Ends(Screen())
    say(log, "gateway", "the port is taken", error=True)
    ends.record_end("gateway", log, 1)
    assert ends.reasons == {"gateway": "the port is taken"}
    ends.record_end("gateway", log, -9)
    assert ends.reasons == {"gateway": NO_REASON}
    first, second = capsys.readouterr().err.splitlines()
    assert "ended with code 1 (the port is taken)" in first
    assert "ended with code -9 and" in second


def test_a_log_that_grew_too_large_is_begun_anew(log: Path) -> None:
    with log.open("ab") as writer:  # as a process has it open
        writer.write(b"x" * 2000 + b"\n")
        writer.flush()
        bound_log(log, 3000)
        assert log.stat().st_size == 2001, "it may still grow"
        bound_log(log, 1000)
        assert log.stat().st_size == 0
        writer.write(b'{"level": "error", "message": "after"}\n')
        writer.flush()
    assert log.with_suffix(".log.1").read_bytes() == b"x" * 2000 + b"\n"
    assert log.with_suffix(".log.1").stat().st_mode & 0o777 == 0o600
    assert last_problem(log, 2001) == "after", "where a process began in the log before means nothing now"


def test_what_a_host_is_good_for(log: Path) -> None:
    assert capacity(log) is None
    rooms = {"device_adapters": {"8": 2, "16": 1, "128": 0}, "host_adapters": {"8": 20, "16": 10}}
    say(log, "engine", "capacity", kv_tokens=1, **rooms)
    before = capacity(log)
    assert before is not None, "of a node of an older version, too"
    say(log, "engine", "capacity", **rooms, tokens_per_second={"1": 7.71, "8": 61.5}, device="cpu", dtype="bfloat16")
    found = capacity(log)
    room = "node-1: room for 1 adapters of rank 16 (0 of rank 128), 10 in host memory"
    speed = "node-1: about 7.7 tokens/s to one caller, 62 to 8 together (cpu, bfloat16)"
    assert capacity_lines("node-1", found) == [speed, room]
    unknown = capacity_lines("node-1", msgspec.structs.replace(found, tokens_per_second={}))
    assert unknown[0] == "node-1: tokens per second are not known (garnish profile measures them) (cpu, bfloat16)"
