"""What /proc tells of a process: who it is (ids are used again), whether it lives, what tag it carries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

PROC = Path("/proc")
NODE_TAG = "GARNISH_POOL_NODE"
"""`<service>/<pool>/<node>` in the environment of a pool's node and of all that it starts."""
STATE_TAG = "GARNISH_POOL_STATE"
"""The state directory: two services of one name on a host are two."""


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
