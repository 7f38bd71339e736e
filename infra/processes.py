"""Finds, identifies and ends the processes of local nodes, by their pid files and by their tags in /proc.

A process is identified by its pid and start time, since the kernel reuses pids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from infra.errors import InfraError
from infra.text import write_atomically

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""Seconds to wait for a process to end after SIGKILL; only a process that hangs in the kernel takes longer."""
PROC = Path("/proc")
NODE_TAG = "GARNISH_POOL_NODE"
STATE_TAG = "GARNISH_POOL_STATE"
"""Environment variable with the state directory. It distinguishes services with the same name on a host."""


class NodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a node: state directory (an absolute path), service, pool and node id."""

    state: str
    service: str
    pool: str
    node: str

    @property
    def tag(self) -> str:
        return f"{self.service}/{self.pool}/{self.node}"

    @property
    def pid_file(self) -> Path:
        return nodes_directory(Path(self.state), self.service) / f"{self.node}.json"

    def environment(self) -> dict[str, str]:
        return {NODE_TAG: self.tag, STATE_TAG: self.state}


class StillRunning(InfraError):
    """Processes did not end, even after SIGKILL."""


def service_directory(state: Path, service: str) -> Path:
    """Returns the default directory for the Terraform files and state of a service's node pools."""
    return state / "infra" / service


def nodes_directory(state: Path, service: str) -> Path:
    return service_directory(state, service) / "nodes"


def write_pid_file(key: NodeKey, pid: int) -> Process | None:
    """Writes the node's pid file, and returns the process, or None if the process has ended already."""
    process = identify(pid)
    if process is None:
        return None
    key.pid_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(key.pid_file, msgspec.json.encode(process).decode())
    return process


def read_pid_file(key: NodeKey) -> Process | None:
    """Returns the process in the pid file, running or not, or None if the file is missing or invalid."""
    try:
        return msgspec.json.decode(key.pid_file.read_bytes(), type=Process)
    except (OSError, msgspec.DecodeError):
        return None


def processes_of(key: NodeKey) -> list[Process]:
    """Returns all running processes of a node: the one in its pid file, and those with its tag."""
    recorded = read_pid_file(key)
    by_pid = {process.pid: process for tag, process in tagged(key.state, key.tag) if tag == key.tag}
    if recorded is not None and is_alive(recorded):
        by_pid[recorded.pid] = recorded
    return [by_pid[pid] for pid in sorted(by_pid)]


def main_process(key: NodeKey) -> Process | None:
    """Returns the node's supervisor, or None if it has ended.

    Without a pid file it is the process with the node's tag whose parent does not have that tag.
    """
    recorded = read_pid_file(key)
    if recorded is not None:
        return recorded if is_alive(recorded) else None
    processes = processes_of(key)
    pids = {process.pid for process in processes}
    roots = [process for process in processes if (stat := read_stat(process.pid)) and stat.parent not in pids]
    return roots[0] if roots else None


def stop(key: NodeKey, grace: float) -> bool:
    """Ends a node. Returns True if any of its processes was running.

    It sends TERM to the supervisor, which drains the node. After `grace` seconds it sends KILL to the remaining
    processes. Raises StillRunning if a process survives.
    """
    processes = processes_of(key)
    if main := main_process(key):
        send(main, signal.SIGTERM)
        _wait(key, grace)
    for process in processes_of(key):
        send(process, signal.SIGKILL)
    if remaining := _wait(key, KILL_SECONDS):
        raise StillRunning(
            f"{key.node}: the processes {', '.join(str(process.pid) for process in remaining)} don't end"
        )
    key.pid_file.unlink(missing_ok=True)
    return bool(processes)


def send(process: Process, number: signal.Signals) -> None:
    """Sends the signal `number` to the process, or does nothing if the process has ended.

    A pidfd is used, so that no other process with the same pid can receive the signal.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def running_nodes(state: Path, service: str, expected: Iterable[NodeKey] = ()) -> dict[NodeKey, Process]:
    """Returns the running supervisors of the service's nodes, by node.

    They are found by their tags, and for the keys in `expected` also by pid files.
    """
    keys = {key_of(str(state), tag) for tag, _ in tagged(str(state), f"{service}/")} | set(expected)
    supervisors = {key: main_process(key) for key in keys if key is not None}
    return {key: process for key, process in supervisors.items() if process is not None}


def key_of(state: str, tag: str) -> NodeKey | None:
    parts = tag.split("/")
    return NodeKey(state=state, service=parts[0], pool=parts[1], node=parts[2]) if len(parts) == 3 else None


def _wait(key: NodeKey, seconds: float) -> list[Process]:
    """Waits until all processes of the node have ended, for at most `seconds`. Returns the remaining ones."""
    deadline = time.monotonic() + seconds
    pause = POLL_SECONDS
    while (remaining := processes_of(key)) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)  # a drain may take an hour
    return remaining


class Process(msgspec.Struct, frozen=True):
    """Identity of a process. A later process with the same pid is not equal to it."""

    pid: int
    start_time: int
    """clock ticks from boot to the process's start (field 22 of /proc/PID/stat)"""
    boot: str


class Stat(msgspec.Struct, frozen=True):
    state: str
    parent: int
    start_time: int


def read_stat(pid: int) -> Stat | None:
    """Returns the fields of /proc/PID/stat that are needed, or None if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may contain blanks and brackets
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Process | None:
    """Returns the running process with this pid, or None if there is none or it is a zombie."""
    stat = read_stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(pid, stat.start_time, boot_id())


def is_alive(process: Process) -> bool:
    return identify(process.pid) == process


def tags(pid: int) -> tuple[str, str] | None:
    """Returns (state directory, node tag) from the process's environment.

    Returns None if the process is not tagged, or belongs to another user.
    """
    try:
        entries = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    variables = {name: os.fsdecode(value) for name, _, value in (entry.partition(b"=") for entry in entries)}
    node, state = variables.get(NODE_TAG.encode()), variables.get(STATE_TAG.encode())
    return None if node is None or state is None else (state, node)


def tagged(state: str, prefix: str) -> Iterator[tuple[str, Process]]:
    """Yields (tag, process) of the running processes of this state directory whose tag begins with `prefix`."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        process_tags = tags(int(entry.name))
        if process_tags is None or process_tags[0] != state or not process_tags[1].startswith(prefix):
            continue
        process = identify(int(entry.name))
        if process is not None and tags(int(entry.name)) == process_tags:  # else another process has the pid by now
            yield process_tags[1], process
