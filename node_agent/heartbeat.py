"""The engine's heartbeat: its loop writes one small file in the node's run directory, mapped into memory, and the API
process and the supervisor look at it. A loop that hangs and a process that was stopped look the same: no beat comes.

Before it computes something long the engine says for how long it may be silent. Silence is counted in the watcher's own
looks, so that a host which stood still as a whole does not count as an engine that did.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

NAME = "engine.beat"
"""File name, in the folder of the engine's socket."""
_BEAT = struct.Struct("<Qqd")


class Beat(NamedTuple):
    number: int
    pid: int
    """id of the process that beats"""
    quiet: float
    """seconds for which it may be silent from then on"""


class Heartbeat:
    """The engine's side of its heartbeat. Raises OSError when the file can't be made."""

    def __init__(self, path: Path) -> None:
        self._map = _map(path, os.O_RDWR | os.O_CREAT)
        self._count, self._pid = _BEAT.unpack_from(self._map)[0], os.getpid()

    def beat(self, quiet: float = 0.0) -> None:
        self._count += 1
        _BEAT.pack_into(self._map, 0, self._count, self._pid, quiet)


class Watch:
    """A watcher's side of a heartbeat, which looks about every `interval` seconds. `now` is monotonic seconds."""

    def __init__(self, path: Path, interval: float) -> None:
        self.interval = interval
        self._path = path
        self._memory: mmap.mmap | None = None
        self._looked = 0.0
        self._beat = Beat(0, 0, 0.0)
        self._silent = 0.0

    def silence(self, now: float, pid: int | None = None) -> float:
        """Returns for how many seconds no beat has come; 0 before the first one (of process `pid`, if given)."""
        before, self._beat = self._beat, self._read()
        gap, self._looked = min(now - self._looked, 2 * self.interval), now
        unheard = self._beat.number == 0 or pid not in (None, self._beat.pid)
        self._silent = 0.0 if unheard or self._beat.number != before.number else self._silent + gap
        return self._silent

    def overdue(self, now: float) -> float:
        """Returns for how many seconds longer than announced no beat has come."""
        return max(0.0, self.silence(now) - self._beat.quiet)

    def _read(self) -> Beat:
        try:
            self._memory = self._memory or _map(self._path, os.O_RDWR)
        except OSError:
            return Beat(0, 0, 0.0)  # no engine has been warm here yet
        return Beat._make(_BEAT.unpack_from(self._memory))


def _map(path: Path, flags: int) -> mmap.mmap:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, _BEAT.size)
        return mmap.mmap(fd, _BEAT.size)
    finally:
        os.close(fd)
