"""Heartbeat of the engine, in memory that the node's processes share. The engine's loop writes it; the API process and
the supervisor read it. A hung loop and a stopped process look the same: beats stop.

The memory is a memfd of the supervisor, which its children inherit. It is not a file of the run directory, because a
mapped file on a full or broken disk ends its writer by SIGBUS.

Before a long computation the engine announces how long it may be silent. Silence is measured in the watcher's own
polls, so that a pause of the whole host does not count.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

_BEAT = struct.Struct("<Qqd")


class Beat(NamedTuple):
    """Content of the heartbeat's memory."""

    number: int
    pid: int
    """id of the engine process"""
    quiet: float
    """seconds after this beat for which the engine has announced that it may be silent"""


def heartbeat_memory() -> int:
    """Returns the descriptor of new memory for a heartbeat. Its page is allocated, so writes never fail. Raises
    OSError."""
    fd = os.memfd_create("garnish-heartbeat", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _BEAT.size)
    except OSError:
        os.close(fd)
        raise
    return fd


class Heartbeat:
    """Writer of the heartbeat in the memory `fd`, in the engine. Raises OSError when the memory can't be mapped."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, _BEAT.size)
        self._count, self._pid = _BEAT.unpack_from(self._map)[0], os.getpid()

    def beat(self, quiet: float = 0.0) -> None:
        self._count += 1
        _BEAT.pack_into(self._map, 0, self._count, self._pid, quiet)


class Watch:
    """Reader of the heartbeat in the memory `fd`. Its methods are called about every `interval` seconds; `now` is in
    monotonic seconds."""

    def __init__(self, fd: int, interval: float) -> None:
        self.interval = interval
        self._memory = mmap.mmap(fd, _BEAT.size, prot=mmap.PROT_READ)
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
        return Beat._make(_BEAT.unpack_from(self._memory))
