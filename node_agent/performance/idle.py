"""Measures a node's performance model while the node is idle, in short slices of time that end at once when a call
comes.

A slice borrows rows, cache and adapter memory, and returns them at its end. A request between two slices finds the
engine unchanged. Only the measured times are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from adapters.base_model import BaseModel
from cluster.performance_file import PerformanceProfile
from cluster.performance_fit import MAX_ERROR_IDLE
from node_agent.config import EngineConfig
from node_agent.device import is_out_of_memory
from node_agent.engine.loop import Engine
from node_agent.performance.cases import IDLE, Bounds, Case
from node_agent.performance.idle_base import FASTEST, Fits, IdleMeasurementBase, MeasurementFailed
from node_agent.performance.repeats import passes
from node_agent.performance.setup import cold_costs, fit, profile_of, publish
from node_agent.performance.sweep import Bench, Run, all_cases, bench, sweep_of

SLICE_S = 0.2
"""Seconds after which a slice starts no further pass."""


class IdleMeasurement(IdleMeasurementBase):
    """Measurement of the performance model of our own engine, by passes of its runner."""

    engine: Engine

    def __init__(self, engine: Engine, config: EngineConfig, base: BaseModel) -> None:
        super().__init__(engine, config)
        self.base = base
        self._written: set[int] = set()
        """numbers of the cache blocks that earlier slices have written"""
        self._cold_costs = cold_costs(engine, base)
        """costs measured before the first call; later, adapters occupy the pages used for measuring the link"""
        self._begin_anew(None)

    def _measure(self, should_yield: Callable[[], bool]) -> None:
        """Measures for about SLICE_S seconds, at least one pass. `should_yield` is called before passes and, on a CPU,
        between layers."""
        try:
            with bench(
                self.engine, self.base, IDLE, budget=SLICE_S, should_yield=should_yield, written=self._written
            ) as timed:
                if timed.bounds != self._bounds:
                    self._begin_anew(timed.bounds)
                self._run(timed)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise MeasurementFailed("there was too little memory") from None

    def _begin_anew(self, bounds: Bounds | None) -> None:
        """Drops all measurements, and plans new cases for the room given by `bounds`."""
        self._bounds = bounds
        self._cases: list[Case] = [] if bounds is None else all_cases(IDLE, bounds)
        self._runs: dict[Case, list[Run]] = {}
        self._begin_rounds()

    def _begin_rounds(self) -> None:
        self._ahead = passes(self._cases, IDLE.rounds)[::-1]
        """remaining passes in reverse order: the last is computed next"""

    def _run(self, timed: Bench) -> None:
        until = time.monotonic() + SLICE_S
        while self._ahead:
            sample = timed.run(self._ahead[-1])
            self._runs.setdefault(self._ahead.pop(), []).append(sample)
            if time.monotonic() > until:
                return

    def _share_done(self) -> float:
        total = len(self._cases) * IDLE.rounds
        return 1.0 - len(self._ahead) / total if total else float(self._bounds is not None)

    def _fit(self) -> Callable[[], Fits]:
        sweep = sweep_of(self._runs, max(1, len(self._cases)), FASTEST)
        return partial(fit, sweep, self.engine.lora_kernel, MAX_ERROR_IDLE)

    def _publish(self, fits: Fits) -> PerformanceProfile:
        profile = profile_of(self.engine, self.base, *fits, self._cold_costs)
        publish(profile, self.engine, self.config, self._cold_costs)
        return profile

    @property
    def _passes(self) -> int:
        return sum(len(of_case) for of_case in self._runs.values())
