"""Processes of a pool's nodes, found and ended: real ones, whose ends and tags are those of the kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from infra.processes import (
    NodeKey,
    Process,
    identify,
    is_alive,
    main_process,
    processes_of,
    read_pid_file,
    read_stat,
    running_nodes,
    send,
    stop,
    tags,
    write_pid_file,
)

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
# Its child says that it is up: while a process is in the midst of its exec it has no environment to be known by.
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', \"import time; print('up', flush=True); time.sleep(600)\"])\n"
    "time.sleep(600)"
)
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def key(tmp_path: Path) -> NodeKey:
    return NodeKey(state=str(tmp_path), service="demo", pool="here", node="here-1")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program and waits until it is up; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, key: NodeKey | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **(key.environment() if key else {})},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ended(process: subprocess.Popen[str]) -> int:
    return process.wait(30)


def test_a_node_is_remembered_and_ended(key: NodeKey, start: Start) -> None:
    process = start(SLEEP, key)
    assert write_pid_file(key, process.pid) == read_pid_file(key) == main_process(key)
    assert (key.pid_file.stat().st_mode & 0o777, key.pid_file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    reaped_by(process, lambda: stop(key, 10.0))
    assert ended(process) == -signal.SIGTERM
    assert not key.pid_file.exists()
    assert not stop(key, 0.0), "nothing is left to end"


def reaped_by(process: subprocess.Popen[str], act: Callable[[], object]) -> None:
    """What is not reaped stays a zombie; `act` must get along with that."""
    act()
    assert read_stat(process.pid) is None or read_stat(process.pid).state == "Z"  # type: ignore[union-attr]


def test_a_lost_pid_file_loses_no_process(key: NodeKey, start: Start) -> None:
    process = start(SLEEP, key)
    write_pid_file(key, process.pid)
    key.pid_file.unlink()
    assert [found.pid for found in processes_of(key)] == [process.pid]
    assert stop(key, 10.0)
    assert ended(process) == -signal.SIGTERM


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b'{"pid": "x", "start_time": 1, "boot": ""}'])
def test_a_broken_pid_file_is_as_good_as_none(key: NodeKey, start: Start, content: bytes) -> None:
    process = start(SLEEP, key)
    write_pid_file(key, process.pid)
    key.pid_file.write_bytes(content)
    assert read_pid_file(key) is None
    assert stop(key, 10.0)
    assert ended(process) == -signal.SIGTERM


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot": "another boot"}])
def test_a_stranger_with_the_same_process_id_is_left_alone(
    key: NodeKey, start: Start, change: dict[str, object]
) -> None:
    stranger = start(SLEEP)
    known = identify(stranger.pid)
    assert known is not None
    key.pid_file.parent.mkdir(parents=True)
    key.pid_file.write_bytes(msgspec.json.encode(msgspec.structs.replace(known, **change)))
    assert processes_of(key) == []
    assert main_process(key) is None
    send(msgspec.structs.replace(known, **change), signal.SIGKILL)
    assert not stop(key, 0.0)
    assert stranger.poll() is None
    assert not key.pid_file.exists()


def test_tags_of_others_are_others(key: NodeKey, start: Start, tmp_path: Path) -> None:
    for other in (
        NodeKey(state=key.state, service="demo", pool="here", node="here-10"),
        NodeKey(state=key.state, service="demo2", pool="here", node="here-1"),
        NodeKey(state=str(tmp_path / "other"), service="demo", pool="here", node="here-1"),
    ):
        process = start(SLEEP, other)
        assert tags(process.pid) == (other.state, other.tag)
        assert processes_of(key) == []
    assert {found.node for found in running_nodes(Path(key.state), "demo")} == {"here-10"}


def test_a_zombie_does_not_live(key: NodeKey, start: Start) -> None:
    process = start(SLEEP, key)
    known = write_pid_file(key, process.pid)
    assert known is not None
    os.kill(process.pid, signal.SIGKILL)
    while (stat := read_stat(process.pid)) and stat.state != "Z":
        time.sleep(0.01)
    assert read_stat(process.pid) is not None, "it is not reaped yet"
    assert not is_alive(known)
    assert identify(process.pid) is None
    assert running_nodes(Path(key.state), "demo", [key]) == {}
    assert not stop(key, 0.0)


def test_what_ignores_term_is_killed(key: NodeKey, start: Start) -> None:
    process = start(STUBBORN, key)
    write_pid_file(key, process.pid)
    assert stop(key, 0.2)
    assert ended(process) == -signal.SIGKILL


@pytest.mark.parametrize("with_file", [True, False])
def test_children_go_with_their_parent(key: NodeKey, start: Start, with_file: bool) -> None:
    """Here they do not end by themselves, as those of a real node do."""
    process = start(PARENT, key)
    if with_file:
        write_pid_file(key, process.pid)
    assert len(processes_of(key)) == 2
    main = main_process(key)
    assert main is not None and main.pid == process.pid
    assert stop(key, 0.2)
    assert processes_of(key) == []


def test_a_node_whose_supervisor_has_died_does_not_live(key: NodeKey, start: Start) -> None:
    process = start(PARENT, key)
    write_pid_file(key, process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert len(processes_of(key)) == 1, "its child is left"
    assert running_nodes(Path(key.state), "demo", [key]) == {}
    assert stop(key, 0.0)
    assert processes_of(key) == []


def test_a_signal_to_one_that_is_gone_reaches_nobody() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    send(Process(process.pid, 1, "boot"), signal.SIGKILL)


def test_names_of_processes_may_hold_anything(tmp_path: Path, start: Start) -> None:
    program = tmp_path / "a) Z (b"
    program.write_text(f"#!{sys.executable}\n{SLEEP}\n")
    program.chmod(0o755)
    process = subprocess.Popen([str(program)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    stat = read_stat(process.pid)
    assert stat is not None and (stat.parent, stat.state in "SR") == (os.getpid(), True)
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_stranger_that_takes_the_id_over_while_it_is_looked_at(
    key: NodeKey, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = start(SLEEP)
    before = iter([(key.state, key.tag)])

    def told(pid: int) -> tuple[str, str] | None:
        """The tags of the node that had the id a moment ago, once."""
        return next(before, None) if pid == stranger.pid else tags(pid)

    monkeypatch.setattr("infra.processes.tags", told)
    assert processes_of(key) == []
