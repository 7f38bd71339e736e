"""Processes that a study starts, and what the processes of a service use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which stays over exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the benchmark has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tethered(command: list[str]) -> list[str]:
    """Returns a command that becomes this one in the same process, which the kernel kills when its parent ends: more
    precisely the thread that started it."""
    return [sys.executable, "-ISc", TETHER, str(os.getpid()), *command]


@contextmanager
def process(
    arguments: list[str], sent: bytes | None, log: Path, tree: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs Python with these arguments, and ends it with the context.

    `sent` is its whole standard input; with None that stays open as long as the context. `tree`: the folder whose code
    runs, this one by default.
    """
    settings = {} if tree is None else {"cwd": tree, "env": os.environ | {"PYTHONPATH": str(tree)}}
    with log.open("wb") as errors:
        command = tethered([sys.executable, *arguments])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, **settings)  # type: ignore[call-overload]
    assert process.stdin is not None and process.stdout is not None
    try:
        if sent is not None:
            process.stdin.write(sent)
            process.stdin.close()
        yield process
    finally:
        process.stdin.close()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        process.wait()
        process.stdout.close()


def child_pids(pid: int) -> list[int]:
    """Returns the direct children. Raises FileNotFoundError, ProcessLookupError if the process has ended."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of the process alone. Raises as `child_pids` does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def service_usage(pid: int) -> dict[str, tuple[float, int]]:
    """Returns processor seconds and bytes of memory of the gateway and the node that `garnish up` (`pid`) started.

    A page that n processes share counts as an nth in each.
    """
    usages: dict[str, tuple[float, int]] = {}
    for child in child_pids(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # some live for a moment
            command = Path(f"/proc/{child}/cmdline").read_text()
            name = "gateway" if "run_gateway" in command else "node" if "run_node" in command else "other"
            usages[name] = _sum([usages.get(name, (0.0, 0)), tree_usage(child)])
    return usages


def tree_usage(pid: int) -> tuple[float, int]:
    """Returns processor seconds and bytes of memory of a process and of all below it that live."""
    try:
        children, seconds = child_pids(pid), cpu_seconds(pid)
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0, 0
    memory = next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return _sum([(seconds, memory), *map(tree_usage, children)])


def _sum(usages: Iterable[tuple[float, int]]) -> tuple[float, int]:
    seconds, memory = zip(*usages, strict=True)
    return sum(seconds), sum(memory)
