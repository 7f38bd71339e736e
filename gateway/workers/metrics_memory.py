"""Memory in which several gateway workers share their metrics: one anonymous mapping, made before workers are forked.

It has no file. A mapped file on a disk that others fill kills its writer with SIGBUS at the first page that finds no
room; a file in /dev/shm would do so too, when a container's 64 MB there are used up, and would have to be found and
removed after a kill. Anonymous pages come from the host's memory like any other object of the process, and end with the
last process that has them. Summing through Redis would lose what ended workers counted whenever Redis is away.

The mapping is cut into slots of SLOT_BYTES, one for each worker at a time. A slot is append-only: entries of a key and
two numbers, and the count of used bytes at its beginning. The worker that gets the slot of one that ended continues its
counters, so that sums never fall. SLOTS is what the usage journal has, for workers of two reloads together.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from threading import Lock

SLOTS = 64
"""Maximum workers at once, those that end their last requests after a reload included."""
SLOT_BYTES = 16 << 20
"""Bytes of one worker's entries: about 80,000 values. Pages that are never written take no memory."""

MAP_NORESERVE = 0x4000
"""Flag of Linux's mmap, which Python's module does not name: pages that are never written count for nothing."""

_USED = struct.Struct("<q")
_SIZE = struct.Struct("<q")
_NUMBERS = struct.Struct("<dd")


class NoMetricsMemory(OSError):
    """The host refuses to reserve the memory for the workers' metrics."""


class MetricsMemory:
    """Slots of all workers. The arbiter creates it and assigns slots; workers inherit the mapping when they are
    forked."""

    def __init__(self, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        """Reserves the memory. Raises NoMetricsMemory."""
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.slot_bytes = slot_bytes
        try:
            self._map = mmap.mmap(-1, slots * slot_bytes, flags=flags)
        except OSError as error:
            size = slots * slot_bytes >> 20
            raise NoMetricsMemory(
                error.errno, f"{size} MiB of address space for metrics are refused ({error.strerror}): raise the limit"
            ) from error
        self._used_slots: list[bool] = [False] * slots

    def take(self) -> int | None:
        """Returns a free slot, preferably one that an earlier worker used; None if there is none. Called by the arbiter
        alone."""
        free = (number for number, is_used in enumerate(self._used_slots) if not is_used)
        number = next(free, None)
        if number is not None:
            self._used_slots[number] = True
        return number

    def release(self, number: int) -> None:
        """Frees the slot of a worker that has ended. Its gauges become invalid, its counters stay."""
        self.slot(number).clear_gauges()
        self._used_slots[number] = False

    def slot(self, number: int) -> Slot:
        return Slot(self._map, number * self.slot_bytes, self.slot_bytes)

    def slots(self) -> Iterator[Slot]:
        """Yields the slots that have entries."""
        for number in range(len(self._used_slots)):
            slot = self.slot(number)
            if slot.used:
                yield slot


class Slot:
    """Entries of one worker: each has a key, a value and a Unix time (0: not set)."""

    def __init__(self, memory: mmap.mmap, start: int, size: int) -> None:
        self._memory, self._start, self._size = memory, start, size
        self._lock = Lock()

    @property
    def used(self) -> int:
        """Bytes of all entries."""
        return int(_USED.unpack_from(self._memory, self._start)[0])

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Yields each entry's key, and the place of its numbers."""
        place = self._start + _USED.size
        end = place + self.used
        while place < end:
            (length,) = _SIZE.unpack_from(self._memory, place)
            place += _SIZE.size
            padded = length + -length % 8  # numbers are aligned, so that a reader never sees half of one
            yield self._memory[place : place + length], place + padded
            place += padded + _NUMBERS.size

    def add(self, key: bytes) -> int | None:
        """Appends an entry with the value 0, and returns the place of its numbers; None if the slot is full."""
        with self._lock:
            used = self.used
            place = self._start + _USED.size + used
            padded = len(key) + -len(key) % 8
            size = _SIZE.size + padded + _NUMBERS.size
            if _USED.size + used + size > self._size:
                return None
            _SIZE.pack_into(self._memory, place, len(key))
            self._memory[place + _SIZE.size : place + _SIZE.size + len(key)] = key
            _USED.pack_into(self._memory, self._start, used + size)  # last: readers see complete entries only
            return place + _SIZE.size + padded

    def read(self, place: int) -> tuple[float, float]:
        """Returns the value and the time at a place."""
        value, at = _NUMBERS.unpack_from(self._memory, place)
        return value, at

    def write(self, place: int, value: float, at: float = 0.0) -> None:
        _NUMBERS.pack_into(self._memory, place, value, at)

    def clear_gauges(self) -> None:
        """Sets gauges to 0 without a time, as of a worker that has ended."""
        for key, place in self.entries():
            if key.startswith(GAUGE):
                self.write(place, 0.0)


GAUGE = b'["gauge"'
"""Beginning of a gauge's key, which is a JSON list whose first item is the metric's type."""
