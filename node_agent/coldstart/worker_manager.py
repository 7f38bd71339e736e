"""Starts a node's CPU LoRA workers, and measures cold calls with them.

It measures at the node's start. While the node is idle, it measures again after the link or the engine's speed has
changed, or after calls of an unmeasured kind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from adapters.base_model import BaseModel
from kernels.handoff import UnsupportedMachine
from node_agent.coldstart.auto_workers import (
    JUDGED,
    MAX_WORKERS,
    PLANS,
    SHORT_PROMPT,
    TYPICAL,
    candidate_counts,
    is_judged,
    judge_calls,
    judge_link,
    refusal,
)
from node_agent.coldstart.calibration import Calibration, Interrupted, never
from node_agent.coldstart.cold_starts import WorkersDecision
from node_agent.coldstart.cost_check import RETRY_S, CostCheck, Pause
from node_agent.coldstart.learning import engine_correction
from node_agent.coldstart.measure import SHORT, measure
from node_agent.coldstart.pass_times import ROUNDS, CallKind
from node_agent.coldstart.profile import Profile, ProfileFile
from node_agent.coldstart.setup import check_handoff, profile_key
from node_agent.coldstart.stream import StreamPool
from node_agent.coldstart.worker_start import (
    make_workers,
    measure_workers,
    prepare_handoffs,
    start_warm,
    worker_cores,
)
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import EngineConfig
from node_agent.engine.loop import Engine

log = logging.getLogger("garnish.engine")

START_LIMIT_S = 60.0
ABOUT_AS_FAST = 1.05
"""Factor within which the time to first token with fewer workers counts as equally good."""
DECISION_ROUNDS = 8
"""Number of calls of each plan that are measured to decide whether to use workers, or to narrow the bounds of a kind of
call."""
BURST_ROUNDS = 3
"""Number of bursts of concurrent calls of each plan that are measured for the same decision."""
ALL_PLANS = ("wait", *PLANS)


class WorkerManager:
    """Starts, measures and replaces the CPU workers of one engine. Only the engine's thread calls it."""

    def __init__(self, engine: Engine, config: EngineConfig, base: BaseModel, threads: int) -> None:
        """`threads`: torch threads of the engine while no worker is armed."""
        self.engine, self.config, self.base, self.threads = engine, config, base, threads
        self.starts = engine.cold_start
        self._key = profile_key(engine, config, base)
        self._file = ProfileFile(Path(config.profile) if config.profile else None)
        self._check = CostCheck(engine, base)
        self._starting: WorkerPool | None = None
        """workers that are starting, or are measured again, while the node serves"""
        self._warm_by = 0.0
        self._retry = Pause(RETRY_S)

    def start(self) -> None:
        """Reads or measures the node's profile and starts the workers. Raises ValueError when the number of workers in
        the settings is impossible."""
        config, starts = self.config, self.starts
        if starts.mode.plans == ("wait",):
            starts.decision = WorkersDecision(0, f"cold_start: {config.cold_start} has no use for them")
            return
        stored = self._file.read(self._key)
        profile = stored or measure(self._key, self.engine.runner, self.engine.blocks, starts.store, None, SHORT)
        starts.use(profile, None)
        why = refusal(config)
        if config.cpu_workers:
            self._check_set(config.cpu_workers, why)
        starts.decision = self._decide(why)
        if starts.decision.count and self._unless_impossible(lambda: self._launch(starts.decision.count)):
            self._judge(never)
        self._write()
        self._report()

    def close(self) -> None:
        """Closes workers that are still starting. The engine closes the others."""
        if self._starting is not None and self._starting is not self.starts.workers:
            self._starting.close()
            self._starting = None

    def work(self, should_yield: Callable[[], bool]) -> bool:
        """Measures calls while the node is idle, until `should_yield` returns True. Returns False when there is nothing
        to measure now."""
        if not self._retry.over or should_yield():
            return False
        if self._starting is not None:
            return self._finish_start(self._starting, should_yield)
        if self.config.cpu_workers is None and not refusal(self.config) and self._check.detect_change():
            profile = self._check.measure(should_yield)
            if profile is not None:
                self._judge_again(profile)
            return True
        if self.starts.unmeasured and self.starts.assists:
            self._measure_kind(next(iter(self.starts.unmeasured)), should_yield)
            return True
        return False

    # --- decisions

    def _decide(self, why_not: str) -> WorkersDecision:
        """Returns how many workers to start, before calls are measured with them."""
        starts, config, profile = self.starts, self.config, self.starts.profile
        assert profile is not None
        if config.cpu_workers is not None:
            return WorkersDecision(config.cpu_workers if not why_not else 0, why_not or "as set")
        if why_not:
            return WorkersDecision(0, why_not)
        link = judge_link(config, starts.store, self.base, profile)
        cores = len(worker_cores(config, MAX_WORKERS, self.threads))
        if link.count and not cores:
            return WorkersDecision(0, f"this host has one core, which the engine needs; {link.reason}", link.figures)
        if link.count and profile.key.workers and is_judged(starts.times):
            return judge_calls(starts.times, min(profile.key.workers, cores), link)
        return WorkersDecision(min(link.count, cores), link.reason, link.figures)

    def _check_set(self, count: int, why_not: str) -> None:
        if "assist" not in self.starts.mode.plans:
            return
        if why_not:
            raise ValueError(f"cpu_workers: {why_not}; set 0 or auto")
        cores = len(worker_cores(self.config, count, self.threads))
        if count > cores:
            raise ValueError(
                f"cpu_workers: {count} need a core each, and the engine's own leaves {cores}; set cpu_workers lower"
            )

    def _judge(self, should_yield: Callable[[], bool]) -> None:
        """Measures typical calls with the current workers, and keeps as many workers as are useful. If the settings fix
        their number, the calls are measured later, while the node is idle. Raises Interrupted."""
        starts, workers = self.starts, self.starts.workers
        if workers is None:
            return
        if self.config.cpu_workers is not None:
            starts.unmeasured |= dict.fromkeys(JUDGED)
            return
        link = starts.decision
        calibration = Calibration(self.engine, self.base, should_yield)
        try:
            if not is_judged(starts.times):
                self._choose_count(calibration, workers)
        except Interrupted as interrupted:
            if should_yield is not never:
                raise
            log.warning("cold calls could not be measured", extra={"reason": str(interrupted)})
        if starts.workers is not None:
            starts.decision = judge_calls(starts.times, starts.workers.limit, link)
            if not starts.decision.count:
                self._end_workers()

    def _choose_count(self, calibration: Calibration, workers: WorkerPool) -> None:
        """Measures typical calls with 1, 2, 4, ... workers. Keeps the smallest number whose time to first token is
        about as good as the best. Raises Interrupted, with all measurements with workers dropped."""
        times = self.starts.times
        try:
            best = self._best_count(calibration, workers)
            if best < workers.layout.workers:
                times.forget("assist")
                self._keep_only(best, workers)
                calibration.measure(TYPICAL, PLANS, DECISION_ROUNDS)
            calibration.measure(SHORT_PROMPT, PLANS, DECISION_ROUNDS)
        except BaseException:
            times.forget("assist")
            workers.limit = workers.layout.workers
            raise

    def _best_count(self, calibration: Calibration, workers: WorkerPool) -> int:
        times, max_count, seconds = self.starts.times, workers.layout.workers, dict[int, float]()
        for count in candidate_counts(max_count):
            times.forget("assist")
            workers.limit = count
            calibration.measure(TYPICAL, PLANS, DECISION_ROUNDS)
            seconds[count] = median(s.first for s in times.answers(TYPICAL, "assist"))
        if self.config.max_cold > 1:
            calibration.measure(TYPICAL, PLANS, BURST_ROUNDS, self.config.max_cold)
        return min(count for count, s in seconds.items() if s <= ABOUT_AS_FAST * min(seconds.values()))

    def _keep_only(self, count: int, workers: WorkerPool) -> None:
        """Makes cold starts use only `count` workers. At the node's start, the pool is restarted with fewer workers. On
        a serving node the superfluous ones sleep instead, since starting processes would delay calls."""
        if self._starting is not None:
            workers.limit = count
        else:
            self._end_workers()
            self._launch(count)

    # --- while idle

    def _judge_again(self, profile: Profile) -> None:
        """Decides on the workers again, by a profile with changed costs, and stores it. Closes the workers, starts new
        ones, or has the existing ones measured again."""
        starts, workers = self.starts, self.starts.workers
        if starts.profile is not None and profile.layer is not starts.profile.layer:
            starts.device = engine_correction()  # the new profile contains what it had learnt
        starts.use(profile, workers)
        decision = self._decide("")
        if workers is not None and workers.layout.workers < decision.count:
            self._end_workers()  # more may gain now
            workers = None
        there = 0 if workers is None else workers.limit
        starts.decision = WorkersDecision(min(there, decision.count), decision.reason, decision.figures)
        if not decision.count:
            self._end_workers()
        elif workers is None:
            self._unless_impossible(lambda: self._begin_start(decision.count))
        else:
            self._starting = workers
        self._write()
        if self._starting is None:
            self._report()

    def _begin_start(self, count: int) -> None:
        """Starts workers without waiting for them. Raises ValueError, UnsupportedMachine."""
        pool = self._make(count)
        pool.start()
        self._starting, self._warm_by = pool, time.monotonic() + START_LIMIT_S

    def _finish_start(self, pool: WorkerPool, should_yield: Callable[[], bool]) -> bool:
        """Measures calls with workers that were started while idle, once they are warm. Returns False until they
        are."""
        if pool.wait_ready(0.0) < pool.layout.workers and self.starts.workers is None:
            if time.monotonic() < self._warm_by:
                return False
            self._starting = None
            pool.close()
            self.starts.decision = WorkersDecision(0, f"they were not warm within {START_LIMIT_S:.0f} s")
            self._report()
            return True
        try:
            if self._has_costs(pool) or self._unless_impossible(lambda: self._adopt(pool)):
                self._judge(should_yield)
        except Interrupted as interrupted:
            self._postpone(interrupted, by_call=should_yield())
            return True
        self._starting = None
        self._retry = Pause(RETRY_S)
        self._write()
        self._report()
        return True

    def _has_costs(self, pool: WorkerPool) -> bool:
        """Returns whether cold starts use this pool, and its workers' costs are known."""
        profile = self.starts.profile
        return self.starts.workers is pool and profile is not None and profile.cpu is not None

    def _postpone(self, interrupted: Interrupted, by_call: bool) -> None:
        """Begins a pause after an interrupted measurement of calls with workers. It grows unless a real call was the
        reason."""
        if by_call:
            self._retry.begin(RETRY_S)
            return
        seconds = self._retry.lengthen()
        log.warning("cold calls could not be measured", extra={"reason": str(interrupted), "next_try_s": seconds})

    def _unless_impossible(self, start: Callable[[], object]) -> bool:
        """Calls `start`, which starts workers. Returns whether it succeeded.

        Returns False if the machine can't have workers and the settings leave their number to the node, which then
        serves without them. With a fixed number, raises ValueError, UnsupportedMachine.
        """
        try:
            return start() is not False
        except (ValueError, UnsupportedMachine) as error:
            if self.config.cpu_workers is not None:
                raise
            log.error("CPU workers can't be used", extra={"reason": str(error)})
            self.starts.decision = WorkersDecision(0, str(error))
            return False

    def _measure_kind(self, kind: CallKind, should_yield: Callable[[], bool]) -> None:
        """Measures a kind of call that users have made, so that workers may assist later ones. If the kind was measured
        before, measures more calls of it.

        A kind for which the node has no room is not tried again; an interrupted one is tried again after the others.
        """
        unmeasured, times = self.starts.unmeasured, self.starts.times
        del unmeasured[kind]
        rounds = DECISION_ROUNDS if times.is_measured(kind, ALL_PLANS) else ROUNDS
        try:
            Calibration(self.engine, self.base, should_yield).measure(kind, ALL_PLANS, rounds)
        except Interrupted as interrupted:
            log.info("cold calls were not measured", extra={"kind": str(kind), "reason": str(interrupted)})
            self._retry.begin(RETRY_S)
            if should_yield():
                unmeasured[kind] = None
            else:
                self.starts.unmeasurable.add(kind)
            return
        log.info("cold calls measured", extra={"kind": str(kind)})
        self._write()

    # --- start and end of workers

    def _make(self, count: int) -> WorkerPool:
        return make_workers(self.config, self.starts.store, self.base, count, self.threads)

    def _launch(self, count: int) -> None:
        """Starts `count` workers and waits until they are warm. Raises ValueError when the handoff does not work."""
        pool = self._make(count)
        start_warm(pool, START_LIMIT_S)
        self._adopt(pool)

    def _adopt(self, pool: WorkerPool) -> bool:
        """Makes cold starts use the pool's workers, and measures their costs if the profile lacks them. Returns whether
        any worker answers; if none does, closes the pool. Raises ValueError when the handoff does not work."""
        starts, count = self.starts, pool.layout.workers
        assert starts.profile is not None
        is_new = starts.workers is not pool
        if isinstance(pool, StreamPool) and pool.usable and is_new:
            check_handoff(pool)
        profile = starts.profile
        if profile.cpu is None or profile.key.workers != count:
            starts.times.forget("assist")  # other numbers of workers have other times
            cpu, handoff = measure_workers(starts.store, pool)
            profile = replace(profile, key=replace(profile.key, workers=count), cpu=cpu, handoff=handoff)
        if profile.cpu is not None and isinstance(pool, StreamPool) and is_new:
            profile = prepare_handoffs(self.engine.runner, self.engine.blocks, profile)
        if profile.cpu is None:
            log.warning("cold starts use no CPU workers: none answered while they were measured")
            starts.decision = WorkersDecision(0, "none answered while they were measured")
            self._end_workers()
            pool.close()
            return False
        starts.use(replace(profile, passes=starts.times.samples), pool)
        return True

    def _end_workers(self) -> None:
        starts = self.starts
        if starts.workers is not None:
            starts.workers.close()
            assert starts.profile is not None
            starts.use(replace(starts.profile, passes=starts.times.samples), None)

    # --- storage and reports

    def _write(self) -> None:
        """Writes the profile for the next start."""
        profile, workers = self.starts.profile, self.starts.workers
        if profile is not None:
            count = profile.key.workers if workers is None or profile.cpu is None else workers.limit
            key = replace(profile.key, workers=count)
            self._file.write(replace(profile, key=key, passes=self.starts.times.samples))

    def _report(self) -> None:
        decision = self.starts.decision
        log.info(
            "CPU workers are decided",
            extra={"workers": decision.count, "reason": decision.reason, "milliseconds": dict(decision.figures)},
        )
