"""Processes that end with the benchmark that started them, also when it is killed."""

from __future__ import annotations

import os
import sys

CODE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which stays over exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the benchmark has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tethered(command: list[str]) -> list[str]:
    """Returns a command that becomes this one in the same process, which the kernel kills when its parent ends: more
    precisely the thread that started it."""
    return [sys.executable, "-ISc", CODE, str(os.getpid()), *command]
