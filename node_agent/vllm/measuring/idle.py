"""Measures the performance model of a node with vLLM while nobody calls it. A call ends the dummy requests at once, and
waits at most for the step that vLLM computes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster.performance_file import PerformanceProfile
from cluster.performance_fit import MAX_ERROR_IDLE
from node_agent.config import EngineConfig
from node_agent.cores import CoreTimes, core_times
from node_agent.performance import cases
from node_agent.performance.idle_base import FASTEST, PAUSE_S, Fits, IdleMeasurementBase
from node_agent.performance.repeats import GaveWay, passes
from node_agent.vllm.engine import VllmEngine
from node_agent.vllm.measuring.bench import bench, room_of
from node_agent.vllm.measuring.cases import GrowingBatch, PromptPass, Room, growing_batches, prompt_passes
from node_agent.vllm.measuring.samples import Runs, fit_runs
from node_agent.vllm.measuring.setup import Conditions, dummy_folders, profile_of, publish

IDLE = replace(cases.IDLE, tokens=(16, 32, 48, 64, 96, 128, 192, 256))
"""More prompt lengths, since ranks that are padded alike make no difference between passes."""
SLICE_S = 2.0
"""Seconds after which a slice begins no further case."""


class VllmIdleMeasurement(IdleMeasurementBase):
    """Measurement of the performance model of an idle vLLM, by dummy requests."""

    engine: VllmEngine

    def __init__(self, engine: VllmEngine, config: EngineConfig, conditions: Conditions) -> None:
        super().__init__(engine, config)
        self._conditions = conditions
        self._folders = dummy_folders(engine, conditions)
        self._begin_anew(None)

    def _measure(self, should_yield: Callable[[], bool]) -> None:
        room = room_of(self.engine)
        if not room.slots:  # all are held by adapters that must stay
            self._begin_at = time.monotonic() + PAUSE_S
            raise GaveWay
        if self._room is None or room.slots < self._room.slots:
            self._begin_anew(room)
        until = time.monotonic() + SLICE_S
        with bench(self.engine, self._folders, self._runs, should_yield) as timed:
            while self._ahead and time.monotonic() < until:
                timed.measure(self._ahead[-1])
                self._ahead.pop()

    def _begin_anew(self, room: Room | None) -> None:
        """Drops all measurements, and plans new cases for the room."""
        self._room = room
        self._cases: list[GrowingBatch | PromptPass] = []
        if room is not None:
            self._cases = [*growing_batches(IDLE, room), *prompt_passes(IDLE, room)]
        self._runs = Runs()
        self._begin_rounds()

    def _begin_rounds(self) -> None:
        self._ahead = passes(self._cases, IDLE.rounds)[::-1]
        """remaining cases in reverse order: the last is run next"""

    def _share_done(self) -> float:
        total = len(self._cases) * IDLE.rounds
        return 1.0 - len(self._ahead) / total if total else float(self._room is not None)

    def _fit(self) -> Callable[[], Fits]:
        assert self._room is not None
        return partial(fit_runs, self._runs, self._planned, self._room.max_rank, MAX_ERROR_IDLE, FASTEST)

    def _publish(self, fits: Fits) -> PerformanceProfile:
        profile = profile_of(self._conditions, *fits, self._runs.loads)
        publish(profile, self.engine, self.config)
        self._folders.remove()
        return profile

    @property
    def _planned(self) -> int:
        """Number of configurations to measure."""
        return planned(self._cases)

    @property
    def _passes(self) -> int:
        return self._runs.count

    def _core_times(self) -> CoreTimes:
        """Counts vLLM's processes as this one's."""
        times = core_times()
        return CoreTimes(times.passed, times.used, times.this_process + seconds_of_children(os.getpid()))


def planned(cases: list[GrowingBatch | PromptPass]) -> int:
    """Returns the number of configurations of these cases."""
    return sum(len(case.sizes) if isinstance(case, GrowingBatch) else 1 for case in cases)


def seconds_of_children(pid: int) -> float:
    """Returns the CPU seconds that the process's living children and their children have used."""
    ticks, children = dict[int, int](), dict[int, list[int]]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks[int(folder.name)] = int(fields[11]) + int(fields[12])
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    total, ahead = 0, list(children.get(pid, ()))
    while ahead:
        child = ahead.pop()
        total += ticks[child]
        ahead += children.get(child, ())
    return total / os.sysconf("SC_CLK_TCK")
