"""A pool's nodes as processes: their pid files, which of them live, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from infra.errors import InfraError
from infra.local.proc import NODE_TAG, STATE_TAG, Process, identify, is_alive, read_stat, tagged
from infra.text import write_whole

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""After SIGKILL; only a process that hangs in the kernel takes longer."""


class NodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names one node: of which state directory (an absolute path), service and pool it is."""

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
    """Processes that did not end, not even by SIGKILL."""


def service_directory(state: Path, service: str) -> Path:
    """Returns the directory for what is kept of a service's node pools, unless that is kept elsewhere."""
    return state / "infra" / service


def nodes_directory(state: Path, service: str) -> Path:
    return service_directory(state, service) / "nodes"


def remember(key: NodeKey, pid: int) -> Process | None:
    """Writes the node's pid file and returns its process; None when the process has ended already."""
    process = identify(pid)
    if process is None:
        return None
    key.pid_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_whole(key.pid_file, msgspec.json.encode(process).decode())
    return process


def remembered(key: NodeKey) -> Process | None:
    """Returns the process that the pid file names, alive or not; None when the file is lost or broken."""
    try:
        return msgspec.json.decode(key.pid_file.read_bytes(), type=Process)
    except (OSError, msgspec.DecodeError):
        return None


def processes_of(key: NodeKey) -> list[Process]:
    """Returns all living processes of a node: what its pid file names, and whatever carries its tag."""
    named = remembered(key)
    found = {process.pid: process for tag, process in tagged(key.state, key.tag) if tag == key.tag}
    if named is not None and is_alive(named):
        found[named.pid] = named
    return [found[pid] for pid in sorted(found)]


def main_process(key: NodeKey) -> Process | None:
    """Returns the node's supervisor if it lives; without a pid file, the tagged process that none of the others
    started. None without one."""
    named = remembered(key)
    if named is not None:
        return named if is_alive(named) else None
    found = processes_of(key)
    pids = {process.pid for process in found}
    roots = [process for process in found if (stat := read_stat(process.pid)) and stat.parent not in pids]
    return roots[0] if roots else None


def stop(key: NodeKey, grace: float) -> bool:
    """Ends a node: TERM to the supervisor, which drains; after `grace` seconds KILL to what is left. Returns whether
    anything ran.

    Raises StillRunning when a process survives that.
    """
    found = processes_of(key)
    if main := main_process(key):
        send(main, signal.SIGTERM)
        _wait(key, grace)
    for process in processes_of(key):
        send(process, signal.SIGKILL)
    if left := _wait(key, KILL_SECONDS):
        raise StillRunning(f"{key.node}: the processes {', '.join(str(process.pid) for process in left)} don't end")
    key.pid_file.unlink(missing_ok=True)
    return bool(found)


def send(process: Process, number: signal.Signals) -> None:
    """Sends the signal to this very process: its id is held while it is looked at, so that no stranger can take it
    over. Does nothing when the process has ended."""
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


def running_nodes(state: Path, service: str, known: Iterable[NodeKey] = ()) -> dict[NodeKey, Process]:
    """Returns the nodes of the service whose supervisor lives, with its process: all that are tagged, and those `known`
    by their pid files."""
    keys = {key_of(str(state), tag) for tag, _ in tagged(str(state), f"{service}/")} | set(known)
    found = {key: main_process(key) for key in keys if key is not None}
    return {key: process for key, process in found.items() if process is not None}


def key_of(state: str, tag: str) -> NodeKey | None:
    parts = tag.split("/")
    return NodeKey(state=state, service=parts[0], pool=parts[1], node=parts[2]) if len(parts) == 3 else None


def _wait(key: NodeKey, seconds: float) -> list[Process]:
    """Waits until no process of the node lives, `seconds` at most; returns those that still do."""
    deadline = time.monotonic() + seconds
    pause = POLL_SECONDS
    while (left := processes_of(key)) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)  # a drain may take an hour
    return left
