"""CPU cores that a process may use. Does not import torch."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPIN_LIMIT = {"GOMP_SPINCOUNT": "10000"}
"""Environment variables that limit how often OpenMP threads poll before they sleep.

OpenMP's default of 300,000 polls takes milliseconds. Next to a busy process, a polling thread occupies the core that
the awaited thread needs. Every product of a step then takes a scheduler time slice.
"""


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the number of cores that this process may use: its affinity, limited by the container's CPU quota (cgroup
    v2, then v1)."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota_v2(cgroup) or _quota_v1(cgroup)
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def cpu_name() -> str:
    """Returns the processor's model name from the kernel; its architecture where the kernel has no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def core_share(host_nodes: int, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the number of cores for each of `host_nodes` nodes on this host, at least 1."""
    return max(1, usable_cores(cgroup) // host_nodes)


def spare_cores(
    engine_threads: int, cgroup: Path = Path("/sys/fs/cgroup"), order: Sequence[int] | None = None
) -> list[int]:
    """Returns the core numbers for CPU LoRA workers, one for each worker, next to an engine with `engine_threads`
    threads.

    The workers' cores follow the engine's in `order`, which defaults to this process's affinity in ascending order.
    Returns an empty list where the engine needs all cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if order is None else order
    spare = max(0, usable_cores(cgroup) - engine_threads)
    return list(cores[engine_threads:][:spare])


@dataclass(frozen=True)
class CoreTimes:
    """CPU time in seconds, summed over the cores that this process may use. Only differences between two readings are
    meaningful."""

    passed: float
    used: float
    """CPU seconds that all processes together have used on these cores"""
    this_process: float


def core_times(stat: Path = Path("/proc/stat")) -> CoreTimes:
    """Returns the current CPU times. Time stolen from a virtual machine by its host counts as used."""
    cores = os.sched_getaffinity(0)
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return CoreTimes(len(cores) * time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


def others_share(before: CoreTimes, after: CoreTimes) -> float:
    """Returns the share, 0 to 1, of CPU time between two readings that other processes used."""
    other_s = (after.used - before.used) - (after.this_process - before.this_process)
    return min(1.0, max(0.0, other_s / max(after.passed - before.passed, 1e-9)))


def _quota_v2(cgroup: Path) -> float | None:
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)


def _quota_v1(cgroup: Path) -> float | None:
    try:
        limit = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        period = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return limit / period if limit > 0 and period > 0 else None
