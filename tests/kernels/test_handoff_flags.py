"""Flags between processes: nothing is seen before its flag, every wait ends, in the compiled form and in numpy's."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kernels.handoff import (
    DISARMED,
    LINE,
    TIMED_OUT,
    CompiledFlags,
    Flags,
    NumpyFlags,
    UnsupportedMachine,
    check_machine,
    flag_value,
)
from tests.support.draws import MANY

ROOT = Path(__file__).parents[2]
ROUNDS = 40_000 if MANY else 2_000
WORDS = 1024
"""u64 of payload behind its two flags: bigger than a line, so that a store too early or late would be seen."""
KINDS = {"compiled": CompiledFlags, "numpy": NumpyFlags}

PEER = f"""
import mmap, sys
import numpy as np
from kernels.handoff import CompiledFlags, NumpyFlags
kind, fd, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
words = np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint64)
flags, base = {{"compiled": CompiledFlags, "numpy": NumpyFlags}}[kind](), words.ctypes.data
payload, answer = words[16:16 + {WORDS}], words[16 + {WORDS}:16 + 2 * {WORDS}]
for i in range(1, rounds + 1):
    assert flags.wait(base, i, 60_000_000_000), "no flag"
    assert (payload == i).all(), "the flag came before its payload"
    answer[:] = payload * 3
    flags.post(base + 64, i)
"""


@pytest.fixture(params=KINDS)
def flags(request: pytest.FixtureRequest) -> Flags:
    made: Flags = KINDS[request.param]()
    return made


@pytest.fixture
def words() -> np.ndarray:
    """u64, a line each: the armed word, then 4 slots of 3 workers."""
    return np.frombuffer(mmap.mmap(-1, 4096), dtype=np.uint64)


@pytest.mark.parametrize("there", KINDS)
def test_nothing_is_seen_before_its_flag(there: str) -> None:
    """By a peer of this kind, in rounds with each kind here."""
    rounds = {here: ROUNDS if here == there == "compiled" else 300 for here in KINDS}
    fd = os.memfd_create("flags", 0)
    os.truncate(fd, 1 << 16)
    words = np.frombuffer(mmap.mmap(fd, 1 << 16), dtype=np.uint64)
    base = words.ctypes.data
    command = [sys.executable, "-c", PEER, there, str(fd), str(sum(rounds.values()))]
    peer = subprocess.Popen(command, cwd=ROOT, pass_fds=(fd,), stderr=subprocess.PIPE, text=True)
    os.close(fd)
    payload, answer = words[16 : 16 + WORDS], words[16 + WORDS : 16 + 2 * WORDS]
    try:
        turns = [flags for here, count in rounds.items() for flags in [KINDS[here]()] * count]
        for i, flags in enumerate(turns, 1):
            payload[:] = i
            flags.post(base, i)
            assert flags.wait(base + LINE, i, 60_000_000_000), peer.poll()
            assert (answer == 3 * i).all()
    finally:
        peer.kill() if sys.exc_info()[0] else None
        _, errors = peer.communicate(timeout=60)
    assert peer.returncode == 0, errors


def test_a_wait_ends(flags: Flags, words: np.ndarray) -> None:
    assert not flags.wait(words.ctypes.data, 7, 2_000_000)
    assert not flags.wait(words.ctypes.data, 7, 0)
    words[0] = 7
    assert flags.wait(words.ctypes.data, 7, 0)


def test_next_finds_slots_in_turn(flags: Flags, words: np.ndarray) -> None:
    base, workers = words.ctypes.data, 3
    first = base + LINE * 2  # worker 1 of slot 0
    seen = (ctypes.c_uint64 * 4)()
    assert flags.next(first, workers, seen, 0, base, 1_000_000) == DISARMED
    words[0] = 1
    assert flags.next(first, workers, seen, 0, base, 1_000_000) == TIMED_OUT
    for slot in (1, 3):
        words[8 * (1 + slot * workers + 1)] = flag_value(2, slot)
    words[8 * (1 + 2 * workers)] = 99  # worker 0's
    assert [flags.next(first, workers, seen, start, base, 0) for start in range(4)] == [1, 1, 3, 3]
    seen[3] = flag_value(2, 3)
    assert flags.next(first, workers, seen, 2, base, 0) == 1
    words[0] = 0  # what was posted before the disarming is found
    assert flags.next(first, workers, seen, 2, base, 0) == 1
    seen[1] = flag_value(2, 1)
    assert flags.next(first, workers, seen, 2, base, 0) == DISARMED


def test_values_never_repeat_over_epochs() -> None:
    values = {flag_value(epoch, sequence) for epoch in (1, 2, 3) for sequence in (0, 1, (1 << 40) - 1)}
    assert len(values) == 9 and 0 not in values and max(values) < 1 << 63


def test_other_machines_are_refused() -> None:
    check_machine("x86_64")
    with pytest.raises(UnsupportedMachine, match="aarch64"):
        check_machine("aarch64")
