"""Measurement of a performance model while a node is idle, whichever engine it has: attempts, pauses, fit and result.
Does not import torch."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from cluster.performance_file import PerformanceProfile, write_performance
from cluster.performance_fit import DecodeFit, PrefillFit
from node_agent.config import EngineConfig
from node_agent.cores import CoreTimes, core_times, others_share
from node_agent.engine.base import EngineBase
from node_agent.performance.repeats import GaveWay, SweepTooSlow
from node_agent.performance.stored import performance_file

BUSY_SHARE = 0.25
"""Share, 0 to 1, of CPU time used by other processes above which the node counts as sharing its host."""
SHARED_PAUSE_S = 1.8
"""Seconds between two slices on a shared host, so that they take a part of the time. Waiting for the other processes to
end might take forever."""
BUDGET_S = 180.0
"""Maximum seconds that all slices of one measurement take together; beyond it, fewer repeats are made."""
FASTEST = 0.5
"""Share, 0 to 1, of each case's passes that is used: the fastest ones, since other processes on the host only slow
passes down. Their effect on calls is corrected later (node_agent.performance.drift)."""
TRIES = 3
PAUSE_S = 60.0
"""Seconds before another measurement after a failed one, whose disturbance may then have ended."""

Fits = tuple[DecodeFit, PrefillFit]

log = logging.getLogger("garnish.engine")


class MeasurementFailed(RuntimeError):
    """Raised when an attempt can't continue. The message says why."""


class IdleMeasurementBase(ABC):
    """Measurement of the performance model of an idle engine. Only the engine's thread calls it. It sets
    `engine.measuring` and finally `engine.drift`."""

    def __init__(self, engine: EngineBase, config: EngineConfig) -> None:
        self.engine, self.config = engine, config
        self._tries_left, self._begin_at, self._worked = TRIES, 0.0, 0.0
        engine.measuring = 0.0
        self._fits: Future[Fits] | None = None
        log.info("no performance model yet: it is measured while the node is idle, without forecasts until then")

    # --- what a subclass defines

    @abstractmethod
    def _measure(self, should_yield: Callable[[], bool]) -> None:
        """Measures for one slice. Raises GaveWay, SweepTooSlow or MeasurementFailed."""

    @abstractmethod
    def _share_done(self) -> float:
        """Returns the share, 0 to 1, of the planned passes that are measured; 1 when there is nothing left."""

    @abstractmethod
    def _begin_rounds(self) -> None:
        """Plans all passes again. Measured times are kept."""

    @abstractmethod
    def _fit(self) -> Callable[[], Fits]:
        """Returns a function that fits the models to what is measured. Either may raise a ValueError or
        SweepTooSlow."""

    @abstractmethod
    def _publish(self, fits: Fits) -> PerformanceProfile:
        """Gives the engine the model, and returns the profile to store. Raises BadSample."""

    @property
    @abstractmethod
    def _passes(self) -> int:
        """Number of measured passes."""

    def _core_times(self) -> CoreTimes:
        """Returns the CPU times of the host and of this engine."""
        return core_times()

    # --- interface of the main loop

    @property
    def ended(self) -> bool:
        """Returns whether there is nothing more to measure: the engine has a model, or all attempts have failed."""
        return self.engine.drift is not None or not self._tries_left

    def work(self, should_yield: Callable[[], bool]) -> bool:
        """Works for one slice, and stops when `should_yield` returns True. Returns False when there is nothing to do
        now."""
        if self.ended or time.monotonic() < self._begin_at or should_yield():
            return False
        if self._fits is not None:
            return self._take_fits(self._fits)
        started_at, cores = time.monotonic(), self._core_times()
        try:
            self._measure(should_yield)
        except (GaveWay, SweepTooSlow):
            pass  # the next slice continues
        except MeasurementFailed as error:
            self._fail(str(error))
            return True
        ended = time.monotonic()
        self._worked += ended - started_at
        if others_share(cores, self._core_times()) > BUSY_SHARE:
            self._begin_at = ended + SHARED_PAUSE_S
        share = self._share_done()
        self.engine.measuring = min(1.0, round(max(share, self._worked / BUDGET_S), 2))
        if self._worked > BUDGET_S or share >= 1.0:
            self._begin_fit()
        return True

    # --- inside

    def _begin_fit(self) -> None:
        """Starts the fit of the model in a separate thread, since a fit takes longer than a call may wait."""
        try:
            fit = self._fit()
        except SweepTooSlow as error:
            self._fail(str(error))
            return
        with_thread = ThreadPoolExecutor(1, "performance fit")
        self._fits = with_thread.submit(fit)
        with_thread.shutdown(wait=False)

    def _take_fits(self, fits: Future[Fits]) -> bool:
        if not fits.done():
            return False
        self._fits = None
        try:
            profile = self._publish(fits.result())
        except (ValueError, SweepTooSlow) as error:  # a BadFit, a BadSample, or least squares without convergence
            self._fail(str(error))
            return True
        self.engine.measuring = None
        log.info("performance model measured", extra={"seconds": round(self._worked, 1), "passes": self._passes})
        if self.config.profile:
            try:
                write_performance(profile, performance_file(self.config.profile))
            except OSError as error:
                log.warning("the performance model can't be stored", extra={"reason": str(error)})
        return True

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
