"""A pool's nodes as processes: their pid files, which of them live, and how they end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from infra.errors import InfraError
from infra.text import write_whole

POLL_SECONDS = 0.05
KILL_SECONDS = 10.0
"""After SIGKILL; only a process that hangs in the kernel takes longer."""
PROC = Path("/proc")
NODE_TAG = "GARNISH_POOL_NODE"
"""`<service>/<pool>/<node>` in the environment of a pool's node and of all that it starts."""
STATE_TAG = "GARNISH_POOL_STATE"
"""The state directory: two services of one name on a host are two."""


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


class Process(msgspec.Struct, frozen=True):
    """One very process: no later process with the same id is equal to it."""

    pid: int
    start_time: int
    """Clock ticks since boot (field 22 of /proc/PID/stat)."""
    boot: str


class Stat(msgspec.Struct, frozen=True):
    state: str
    parent: int
    start_time: int


def read_stat(pid: int) -> Stat | None:
    """Returns what the kernel says of the process; None when there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return Stat(fields[0], int(fields[1]), int(fields[19]))


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> Process | None:
    """Returns the living process of this id; None without one, and for a zombie, which only waits to be reaped."""
    stat = read_stat(pid)
    return None if stat is None or stat.state in "ZX" else Process(pid, stat.start_time, boot_id())


def is_alive(process: Process) -> bool:
    return identify(process.pid) == process


def tags(pid: int) -> tuple[str, str] | None:
    """Returns (state directory, node tag) that the process was started with; None where it has none, or is another
    user's."""
    try:
        entries = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    found = {name: os.fsdecode(value) for name, _, value in (entry.partition(b"=") for entry in entries)}
    node, state = found.get(NODE_TAG.encode()), found.get(STATE_TAG.encode())
    return None if node is None or state is None else (state, node)


def tagged(state: str, prefix: str) -> Iterator[tuple[str, Process]]:
    """Yields (tag, process) of every living process of this state directory whose tag begins with `prefix`."""
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        found = tags(int(entry.name))
        if found is None or found[0] != state or not found[1].startswith(prefix):
            continue
        process = identify(int(entry.name))
        if process is not None and tags(int(entry.name)) == found:  # else another has taken the id meanwhile
            yield found[1], process
