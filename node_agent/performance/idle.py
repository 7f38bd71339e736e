"""Measures a node's performance model while the node is idle, in short slices of time that end at once when a call
comes.

A slice borrows rows, cache and adapter memory, and returns them at its end. A request between two slices finds the
engine unchanged. Only the measured times are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from adapters.base_model import BaseModel
from cluster.performance_file import write_performance
from cluster.performance_fit import MAX_ERROR_IDLE, DecodeFit, PrefillFit
from node_agent.config import EngineConfig
from node_agent.cores import core_times, others_share
from node_agent.device import is_out_of_memory
from node_agent.engine.loop import Engine
from node_agent.performance.cases import IDLE, Bounds, Case
from node_agent.performance.setup import cold_costs, fit, performance_file, profile_of, publish
from node_agent.performance.sweep import Bench, GaveWay, Run, SweepTooSlow, all_cases, bench, passes, sweep_of

SLICE_S = 0.2
"""Seconds after which a slice starts no further pass."""
BUSY_SHARE = 0.25
"""Share, 0 to 1, of CPU time used by other processes above which the node counts as sharing its host."""
SHARED_PAUSE_S = 9 * SLICE_S
"""Seconds between two slices on a shared host, so that they take a tenth of the time. Waiting for the other processes
to end might take forever."""
BUDGET_S = 180.0
"""Maximum seconds that all slices of one measurement take together; beyond it, fewer repeats are made."""
FASTEST = 0.5
"""Share, 0 to 1, of each case's passes that is used: the fastest ones, since other processes on the host only slow
passes down. Their effect on calls is corrected later (node_agent.performance.drift)."""
TRIES = 3
PAUSE_S = 60.0
"""Seconds before another measurement after a failed one, whose disturbance may then have ended."""

log = logging.getLogger("garnish.engine")


class IdleMeasurement:
    """Measurement of the performance model of an idle engine. Only the engine's thread calls it. It sets
    `engine.measuring` and finally `engine.drift`."""

    def __init__(self, engine: Engine, config: EngineConfig, base: BaseModel) -> None:
        self.engine, self.config, self.base = engine, config, base
        self._written: set[int] = set()
        """numbers of the cache blocks that earlier slices have written"""
        self._tries_left, self._begin_at, self._worked = TRIES, 0.0, 0.0
        self._cold_costs = cold_costs(engine, base)
        """costs measured before the first call; later, adapters occupy the pages used for measuring the link"""
        engine.measuring = 0.0
        self._fits: Future[tuple[DecodeFit, PrefillFit]] | None = None
        self._begin_anew(None)
        log.info("no performance model yet: it is measured while the node is idle, without forecasts until then")

    @property
    def ended(self) -> bool:
        """Returns whether there is nothing more to measure: the engine has a model, or all attempts have failed."""
        return self.engine.drift is not None or not self._tries_left

    def work(self, should_yield: Callable[[], bool]) -> bool:
        """Works for one slice of about SLICE_S seconds, at least one pass. Returns False when there is nothing to do
        now.

        It stops when `should_yield` returns True, which is called before passes and, on a CPU, between layers.
        """
        if self.ended or time.monotonic() < self._begin_at or should_yield():
            return False
        if self._fits is not None:
            return self._take_fits(self._fits)
        started_at, cores = time.monotonic(), core_times()
        try:
            with bench(
                self.engine, self.base, IDLE, budget=SLICE_S, should_yield=should_yield, written=self._written
            ) as timed:
                if timed.bounds != self._bounds:
                    self._begin_anew(timed.bounds)
                self._run(timed)
        except (GaveWay, SweepTooSlow):
            pass  # the next slice continues
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._fail("there was too little memory")
            return True
        ended = time.monotonic()
        self._worked += ended - started_at
        if others_share(cores, core_times()) > BUSY_SHARE:
            self._begin_at = ended + SHARED_PAUSE_S
        self._tell_progress()
        if self._worked > BUDGET_S or (self._bounds is not None and not self._ahead):
            self._begin_fit()
        return True

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

    def _tell_progress(self) -> None:
        total = len(self._cases) * IDLE.rounds
        by_passes = 1.0 - len(self._ahead) / total if total else 0.0
        self.engine.measuring = min(1.0, round(max(by_passes, self._worked / BUDGET_S), 2))

    def _begin_fit(self) -> None:
        """Starts the fit of the model in a separate thread, since a fit takes longer than a call may wait. The
        measurement counts as failed if too few cases were measured."""
        try:
            sweep = sweep_of(self._runs, max(1, len(self._cases)), FASTEST)
        except SweepTooSlow as error:
            self._fail(str(error))
            return
        with_thread = ThreadPoolExecutor(1, "performance fit")
        self._fits = with_thread.submit(fit, sweep, self.engine.lora_kernel, MAX_ERROR_IDLE)
        with_thread.shutdown(wait=False)

    def _take_fits(self, fits: Future[tuple[DecodeFit, PrefillFit]]) -> bool:
        if not fits.done():
            return False
        self._fits = None
        try:
            profile = profile_of(self.engine, self.base, *fits.result(), self._cold_costs)
        except ValueError as error:  # a BadFit, a BadSample, or least squares without convergence
            self._fail(str(error))
            return True
        publish(profile, self.engine, self.config, self._cold_costs)
        self.engine.measuring = None
        log.info("performance model measured", extra={"seconds": round(self._worked, 1), "passes": self._passes})
        if self.config.profile:
            try:
                write_performance(profile, performance_file(self.config.profile))
            except OSError as error:
                log.warning("the performance model can't be stored", extra={"reason": str(error)})
        return True

    @property
    def _passes(self) -> int:
        return sum(len(of_case) for of_case in self._runs.values())

    def _fail(self, reason: str) -> None:
        """Plans another attempt, or gives up after the last one. Measured times are kept, since with more repeats a few
        disturbed passes matter less."""
        self._tries_left -= 1
        self._begin_at, self._worked = time.monotonic() + PAUSE_S, 0.0
        self._begin_rounds()
        if self._tries_left:
            log.warning("no performance model yet; measured again when idle", extra={"reason": reason})
        else:
            self.engine.measuring = None
            log.warning("no performance model: run `garnish profile`", extra={"reason": reason})
