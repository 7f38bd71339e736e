"""Flag words in shared memory, with which a process signals to another that data is ready.

The module does not import torch.

A flag is a 64-bit word in a separate cache line, with one writer. A flag never has the same value twice (`flag_value`),
so a stale or late write is never mistaken for the awaited value.

Memory order: The writer stores its data and then the flag with *release* order. The reader polls the flag with
*acquire* order, and reads the data only after it has loaded the awaited value. That load synchronises with the store,
so everything that the writer wrote before is visible to the reader (C++17 [intro.races]). No process does a
read-modify-write on a flag, or writes a flag of another.

On x86-64 plain moves have both orders, because the processor keeps stores in order, and loads in order (total store
order); `std::atomic` in handoff.cpp keeps the compiler from reordering. Without a compiler numpy's aligned 8-byte loads
and stores are one move each, which the interpreter can neither split nor reorder. Other processors are refused,
since their weaker memory order would cause sporadic failures.
"""

from __future__ import annotations

import ctypes
import platform
import time
from typing import Protocol

import numpy as np

from kernels.build import load_library

Handled = ctypes.Array[ctypes.c_uint64]
"""u64[slots]: the last value of each flag that was handled."""

LINE = 64
"""Bytes of a cache line; each flag has a separate one."""
SEQUENCE_BITS = 40
DISARMED, TIMED_OUT = -1, -2
"""Results of `Flags.next` instead of the number of a slot."""


class UnsupportedMachine(RuntimeError):
    """CPU workers can't run on this processor, because handoffs rely on the memory order of x86-64."""


def flag_value(epoch: int, sequence: int) -> int:
    """Returns the value of a flag for an epoch and a sequence number.

    For an epoch from 1 on the value is never 0, the value of a new word. At one handoff every 10 us the sequence
    numbers of an epoch last four months.
    """
    return epoch << SEQUENCE_BITS | sequence


def check_machine(machine: str = platform.machine()) -> None:
    """Checks that this is x86-64. Raises UnsupportedMachine."""
    if machine not in ("x86_64", "AMD64"):
        raise UnsupportedMachine(f"CPU workers run on x86-64 only, this is {machine}: set cpu workers to 0")


class Flags(Protocol):
    """Operations on flags, which are given by address.

    Each operation takes a bounded time. The store of `post` is complete when it returns.
    """

    def post(self, flag: int, value: int) -> None:
        """Stores the value with release order. A process that loads it sees everything that was written before."""

    def wait(self, flag: int, value: int, timeout_ns: int) -> bool:
        """Polls with acquire order, at least once, until the flag is `value`, and then returns True.

        Returns False after `timeout_ns`.
        """

    def next(self, flags: int, stride: int, handled: Handled, start: int, armed: int, timeout_ns: int) -> int:
        """Waits for a slot whose flag differs from handled[slot], and returns the slot's number.

        Slots are checked from `start` on and then from 0, so the first match in this order is returned. Returns
        DISARMED if no flag differs and the word at address `armed` is 0. Returns TIMED_OUT after `timeout_ns`. `flags`
        is the address of the first slot's flag; the flags of two slots are `stride` cache lines apart.
        """


class CompiledFlags:
    """Flags implemented in handoff.cpp, which runs without the GIL. Raises CompileError."""

    def __init__(self) -> None:
        library = load_library()
        word, count, span = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.post, self.wait, self._next = library.handoff_post, library.handoff_wait, library.handoff_next
        self.post.argtypes, self.post.restype = (word, ctypes.c_uint64), None
        self.wait.argtypes, self.wait.restype = (word, ctypes.c_uint64, span), count
        self._next.argtypes, self._next.restype = (word, span, word, count, count, word, span), count

    def next(self, flags: int, stride: int, handled: Handled, start: int, armed: int, timeout_ns: int) -> int:
        slot: int = self._next(flags, stride, handled, len(handled), start, armed, timeout_ns)
        return slot


class NumpyFlags:
    """Flags for hosts without a compiler. They are slower, and hold the GIL except between polls."""

    def post(self, flag: int, value: int) -> None:
        _word(flag)[0] = value

    def wait(self, flag: int, value: int, timeout_ns: int) -> bool:
        word, end = _word(flag), time.monotonic_ns() + timeout_ns
        while int(word[0]) != value:
            if time.monotonic_ns() >= end:
                return int(word[0]) == value
            time.sleep(0)
        return True

    def next(self, flags: int, stride: int, handled: Handled, start: int, armed: int, timeout_ns: int) -> int:
        slots, end = len(handled), time.monotonic_ns() + timeout_ns
        words = [_word(flags + i * stride * LINE) for i in range(slots)]
        spin = _word(armed)
        while True:
            armed_now = int(spin[0])  # read before the flags, so that a flag posted before the disarming is not missed
            for i in range(slots):
                slot = (start + i) % slots
                if int(words[slot][0]) != handled[slot]:
                    return slot
            if not armed_now:
                return DISARMED
            if time.monotonic_ns() >= end:
                return TIMED_OUT
            time.sleep(0)


def _word(address: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64)), (1,))
