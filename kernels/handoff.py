"""Flag words: how one process tells another that memory which both map has been written. No torch.

A flag is a 64-bit word in a cache line of its own, with one writer. Its value never repeats (epoch and sequence number,
see `flag_value`), so that a word that is still old, or was written too late, is never taken for the awaited one.

Memory order. The writer stores its data and then the flag with *release* order; the reader polls the flag with
*acquire* order and reads the data only after it has seen the awaited value. The store that it saw synchronises with its
load, so everything the writer wrote before is visible to it (C++17 [intro.races]). Nobody does a read-modify-write on a
flag, and nobody writes another's.

On x86-64 both orders are those of plain moves, for the processor keeps stores in order, and loads in order (total store
order); `std::atomic` in handoff.cpp keeps the compiler to it. Without a compiler numpy's aligned 8-byte loads and
stores do the same, one move each, which the interpreter can neither split nor reorder. This relies on x86-64, so
elsewhere nothing here works at all rather than nearly always.
"""

from __future__ import annotations

import ctypes
import platform
import time
from typing import Protocol

import numpy as np

from kernels.build import load_library

Seen = ctypes.Array[ctypes.c_uint64]
"""u64[slots]: the flags' values that were dealt with."""

LINE = 64
"""Bytes of a cache line; a flag has one to itself."""
SEQUENCE_BITS = 40
DISARMED, TIMED_OUT = -1, -2
"""What `next` gives instead of a slot."""


class UnsupportedMachine(RuntimeError):
    """Handoffs rely on the memory order of a processor on which they were never tested."""


def flag_value(epoch: int, sequence: int) -> int:
    """Returns the value of a flag, never 0, which is what a fresh word holds. 2^40 handoffs of 10 us each take four
    months."""
    return epoch << SEQUENCE_BITS | sequence


def check_machine(machine: str = platform.machine()) -> None:
    """Checks that this is x86-64. Raises UnsupportedMachine."""
    if machine not in ("x86_64", "AMD64"):
        raise UnsupportedMachine(f"CPU workers run on x86-64 only, this is {machine}: set cpu workers to 0")


class Flags(Protocol):
    """The operations on flags by address; each bounded. `post` is done before it returns."""

    def post(self, flag: int, value: int) -> None:
        """Stores the value with release order: whoever sees `value` sees everything that was written before."""

    def wait(self, flag: int, value: int, timeout_ns: int) -> bool:
        """Polls with acquire order until the flag is `value`. Returns False when the time has passed. Looks once at
        least."""

    def next(self, flags: int, stride: int, seen: Seen, start: int, armed: int, timeout_ns: int) -> int:
        """Waits for the first slot, from `start` on and round, whose flag differs from seen[slot], and returns it.
        Returns DISARMED when there is none and the word `armed` is 0, TIMED_OUT after `timeout_ns`.

        `flags` is the first slot's; the next is `stride` lines further.
        """


class CompiledFlags:
    """The Flags of handoff.cpp, called without the interpreter's lock. Raises CompileError."""

    def __init__(self) -> None:
        library = load_library()
        word, count, span = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.post, self.wait, self._next = library.handoff_post, library.handoff_wait, library.handoff_next
        self.post.argtypes, self.post.restype = (word, ctypes.c_uint64), None
        self.wait.argtypes, self.wait.restype = (word, ctypes.c_uint64, span), count
        self._next.argtypes, self._next.restype = (word, span, word, count, count, word, span), count

    def next(self, flags: int, stride: int, seen: Seen, start: int, armed: int, timeout_ns: int) -> int:
        found: int = self._next(flags, stride, seen, len(seen), start, armed, timeout_ns)
        return found


class NumpyFlags:
    """Flags without a compiler: slower, and holding the interpreter's lock between polls."""

    def post(self, flag: int, value: int) -> None:
        _word(flag)[0] = value

    def wait(self, flag: int, value: int, timeout_ns: int) -> bool:
        word, end = _word(flag), time.monotonic_ns() + timeout_ns
        while int(word[0]) != value:
            if time.monotonic_ns() >= end:
                return int(word[0]) == value
            time.sleep(0)
        return True

    def next(self, flags: int, stride: int, seen: Seen, start: int, armed: int, timeout_ns: int) -> int:
        slots, end = len(seen), time.monotonic_ns() + timeout_ns
        words = [_word(flags + i * stride * LINE) for i in range(slots)]
        spin = _word(armed)
        while True:
            armed_now = int(spin[0])  # before the flags: what was posted before the disarming is found
            for i in range(slots):
                slot = (start + i) % slots
                if int(words[slot][0]) != seen[slot]:
                    return slot
            if not armed_now:
                return DISARMED
            if time.monotonic_ns() >= end:
                return TIMED_OUT
            time.sleep(0)


def _word(address: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)), (1,))
