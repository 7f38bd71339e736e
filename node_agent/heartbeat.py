"""Heartbeat of the engine: a small memory-mapped file in the node's run directory. The engine's loop writes it; the API
process and the supervisor read it. A hung loop and a stopped process look the same: beats stop.

Before a long computation the engine announces how long it may be silent. Silence is measured in the watcher's own
polls, so that a pause of the whole host does not count.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

NAME = "engine.beat"
"""Name of the heartbeat file, which is in the folder of the engine's socket."""
_BEAT = struct.Struct("<Qqd")


class Beat(NamedTuple):
    """Content of the heartbeat file."""

    number: int
    pid: int
    """id of the engine process"""
    quiet: float
    """seconds after this beat for which the engine has announced that it may be silent"""


class Heartbeat:
    """Writer of the heartbeat, in the engine. Raises OSError when the file can't be created."""

    def __init__(self, path: Path) -> None:
        self._map = _map(path, os.O_RDWR | os.O_CREAT)
        self._count, self._pid = _BEAT.unpack_from(self._map)[0], os.getpid()

    def beat(self, quiet: float = 0.0) -> None:
        self._count += 1
        _BEAT.pack_into(self._map, 0, self._count, self._pid, quiet)


class Watch:
    """Reader of the heartbeat. Its methods are called about every `interval` seconds; `now` is in monotonic seconds."""

    def __init__(self, path: Path, interval: float) -> None:
        self.interval = interval
        self._path = path
        self._memory: mmap.mmap | None = None
        self._looked = 0.0
        self._beat = Beat(0, 0, 0.0)
        self._silent = 0.0

    def silence(self, now: float, pid: int | None = None) -> float:
        """Returns the seconds since the last beat. Returns 0 before the first beat (of process `pid`, if given)."""
        before, self._beat = self._beat, self._read()
        gap, self._looked = min(now - self._looked, 2 * self.interval), now
        unheard = self._beat.number == 0 or pid not in (None, self._beat.pid)
        self._silent = 0.0 if unheard or self._beat.number != before.number else self._silent + gap
        return self._silent

    def overdue(self, now: float) -> float:
        """Returns the seconds by which the present silence exceeds the announced one; 0 if it does not."""
        return max(0.0, self.silence(now) - self._beat.quiet)

    def _read(self) -> Beat:
        try:
            self._memory = self._memory or _map(self._path, os.O_RDWR)
        except OSError:
            return Beat(0, 0, 0.0)  # no engine has started here yet
        return Beat._make(_BEAT.unpack_from(self._memory))


def _map(path: Path, flags: int) -> mmap.mmap:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _BEAT.size)
        return mmap.mmap(fd, _BEAT.size)
    finally:
        os.close(fd)
