"""Processes of a service: on which cores they run, and whether they run at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.processes import processes, tree

COMPUTING = ("VLLM::", "node_agent.engine_process")
"""Parts of the command lines of processes that compute: vLLM's engine core and worker, and our engine."""


@contextmanager
def on_cores(cores: set[int] | None) -> Iterator[None]:
    """Keeps this process, and those that it starts, on these cores while the context lasts. None: changes nothing."""
    before = os.sched_getaffinity(0)
    _move(os.getpid(), cores or before)
    try:
        yield
    finally:
        _move(os.getpid(), before)


def pin(service: int, computing: set[int], serving: set[int]) -> int:
    """Moves the service's processes that compute to the cores `computing`, and its other ones to `serving`. Returns the
    number of processes that compute."""
    count = 0
    for pid in tree(service, processes()):
        computes = _computes(pid)
        _move(pid, computing if computes else serving)
        count += computes
    return count


def stop(service: int) -> None:
    """Stops the service's processes until `resume`, parents first: none sees its own child stop."""
    for pid in tree(service, processes()):
        _send(pid, signal.SIGSTOP)


def resume(service: int) -> None:
    """Resumes the service's processes, parents last."""
    for pid in reversed(tree(service, processes())):
        _send(pid, signal.SIGCONT)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, number)


def _computes(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False
    return any(part in command for part in COMPUTING)


def _move(pid: int, cores: set[int]) -> None:
    """Moves all threads of a process. Those that it starts later go where the starting thread is."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
