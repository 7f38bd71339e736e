"""Runs tests that measure time, and stops all their processes for five seconds at three drawn times: they pass still.

    python -m tests.stall [SEED [PYTEST'S ARGUMENTS]]

What a busy host, a debugger or a sleeping machine does to a service is no failure of it. Exits as pytest does; with 1,
too, when the tests ended before the third stop.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.support.processes import processes, tree

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/gateway/calls/test_node_watch.py",
    "tests/gateway/calls/test_node_faults.py",
    "tests/gateway/calls/test_failover.py",
    "tests/gateway/leader/test_store_leases.py",
    "tests/gateway/workers/test_windows.py",
    "tests/cluster/test_limits.py",
    "tests/cluster/test_limits_without_redis.py",
    "tests/cluster/test_state.py",
    "tests/node_agent/test_heartbeat.py",
    "tests/adapters/test_s3_faults.py",
)
"""Limits, deadlines, leases, records that expire, and a store that hangs."""
STOPS, SECONDS = 3, 5.0
FIRST, LAST = 8.0, 40.0
"""Seconds after the start, the stops not counted, among which the stops are drawn: the tests take longer."""
POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    seed = int(arguments[0]) if arguments else random.randrange(1 << 32)
    draw = random.Random(seed)
    times = sorted(draw.uniform(FIRST, LAST) for _ in range(STOPS))
    tell(f"seed {seed}: stops after {', '.join(f'{at:.1f} s' for at in times)}")
    # Services whose parents have ended stay below this process, and so are found.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *(arguments[1:] or TESTS)]
    with subprocess.Popen(command, cwd=ROOT) as tests:
        stopped, before = 0, 0.0
        for at in times:
            if ends_within(tests, at - before):
                break
            stop_all()
            stopped, before = stopped + 1, at
        ends_within(tests, float("inf"))
    if stopped < STOPS:
        tell(f"the tests ended before stop {stopped + 1} of {STOPS}")
    return tests.returncode or int(stopped < STOPS)


def ends_within(tests: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the tests end; meanwhile orphans that have ended are let go."""
    end = time.monotonic() + seconds
    while tests.poll() is None and time.monotonic() < end:
        for pid, (parent, state) in processes().items():
            if parent == os.getpid() and state == "Z" and pid != tests.pid:
                os.waitpid(pid, 0)
        time.sleep(POLL_SECONDS)
    return tests.returncode is not None


def stop_all() -> None:
    """For SECONDS; what a test has stopped itself stays as it is."""
    stopped: list[int] = []
    while found := [pid for pid in running_below(os.getpid()) if pid not in stopped]:
        send(found, signal.SIGSTOP)
        stopped += found
    tell(f"\nstopped {len(stopped)} processes")
    time.sleep(SECONDS)
    send(reversed(stopped), signal.SIGCONT)


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def running_below(root: int) -> list[int]:
    """Process ids of the tree, without `root`, what is stopped already and what has ended; parents first."""
    known = processes()
    return [pid for pid in tree(root, known)[1:] if known[pid][1] not in "TtZX"]


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
