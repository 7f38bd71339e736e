"""Measures the cold calls by which a node judges its CPU workers, in any number of pieces.

Each finished call is kept. A node whose callers interrupt the measurement again and again finishes it in the gaps
between their calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf
from statistics import median

from node_agent.coldstart.auto_workers import PLANS, SHORT_PROMPT, TYPICAL, candidate_counts
from node_agent.coldstart.calibration import Calibration
from node_agent.coldstart.pass_times import CallKind, PassTimes
from node_agent.coldstart.workers import WorkerPool

ABOUT_AS_FAST = 1.05
"""Factor within which the time to first token with fewer workers counts as equally good."""
DECISION_ROUNDS = 8
"""Number of calls of each plan that are measured to decide whether to use workers, or to narrow the bounds of a kind of
call."""
BURST_ROUNDS = 3
"""Number of bursts of concurrent calls of each plan that are measured for the same decision."""


@dataclass(frozen=True)
class Step:
    """Call to measure, or burst of concurrent calls."""

    workers: int
    """maximum number of workers that compute"""
    kind: CallKind
    plan: str
    calls: int = 1
    is_warm_up: bool = False
    """True if its times do not count, since libraries initialise for new shapes"""


class Judgement:
    """Measured calls with the workers of one pool, by one profile. Only the engine's thread uses it.

    It measures calls with 1, 2, 4, ... workers, then more calls with the chosen number. Until all are measured, the
    cold starts of users' calls know nothing of them.
    """

    def __init__(self, max_count: int, burst: int) -> None:
        """`max_count`: number of workers in the pool; `burst`: number of concurrent calls in a burst."""
        self.times = PassTimes()
        """Measured calls; those with workers are of the number of workers that was measured last."""
        self.best: int | None = None
        """Chosen number of workers; None until calls with every number are measured."""
        self._max_count = max_count
        self._firsts: dict[int, list[float]] = {}
        """times to first token of TYPICAL calls, in seconds, by the number of workers"""
        self._workers = 0
        steps = [step for count in candidate_counts(max_count) for step in _steps(count, TYPICAL)]
        if burst > 1:
            steps += _rounds(max_count, TYPICAL, BURST_ROUNDS, burst)
        self._ahead = steps[::-1]
        """remaining steps of this part in reverse order"""

    def measure(self, calibration: Calibration, pool: WorkerPool, until: float = inf) -> bool:
        """Measures the remaining calls of this part, at least one, until all are measured or the monotonic time `until`
        has come. Returns whether all are measured. Raises Interrupted, and continues with the interrupted call next
        time."""
        starts, limit = calibration.engine.cold_start, pool.limit
        users_times, starts.times = starts.times, self.times
        try:
            while self._ahead:
                self._measure_step(self._ahead[-1], calibration, pool)
                self._ahead.pop()
                if time.monotonic() >= until:
                    break
        finally:
            starts.times, pool.limit = users_times, limit
        return not self._ahead

    def choose_count(self) -> int:
        """Returns the smallest number of workers whose time to first token is about as good as the best. Begins the
        second part of the measurement, with this number of workers."""
        seconds = {count: median(firsts) for count, firsts in self._firsts.items()}
        self.best = best = min(n for n, s in seconds.items() if s <= ABOUT_AS_FAST * min(seconds.values()))
        steps = _steps(best, SHORT_PROMPT)
        if best < self._max_count:
            steps = _steps(best, TYPICAL) + steps
        self._ahead = steps[::-1]
        return best

    def _measure_step(self, step: Step, calibration: Calibration, pool: WorkerPool) -> None:
        if step.workers != self._workers:
            self.times.forget("assist")  # other numbers of workers have other times
            self._workers = step.workers
        pool.limit = min(step.workers, pool.layout.workers)
        sample = calibration.run(step.kind, step.plan, step.calls)
        if step.is_warm_up:
            return
        self.times.add(sample)
        if step.plan == "assist" and step.kind == TYPICAL and step.calls == 1:
            self._firsts.setdefault(step.workers, []).append(sample.first)


def _steps(workers: int, kind: CallKind) -> list[Step]:
    """Returns single calls of each plan: one that does not count, then DECISION_ROUNDS."""
    return [Step(workers, kind, plan, is_warm_up=True) for plan in PLANS] + _rounds(workers, kind, DECISION_ROUNDS)


def _rounds(workers: int, kind: CallKind, rounds: int, calls: int = 1) -> list[Step]:
    """Returns one step of each plan per round. Every second round has the reverse order, so that a pause between two
    pieces of the measurement does not always precede the same plan."""
    return [
        Step(workers, kind, plan, calls) for number in range(rounds) for plan in (PLANS[::-1] if number % 2 else PLANS)
    ]
