"""Starts a node's CPU LoRA workers, and measures cold calls with them.

It measures at the node's start. While the node is idle, it measures again after the link or the engine's speed has
changed, or after calls of an unmeasured kind. A judgement of the workers that could not be finished stays open, and is
continued while the node is idle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from msgspec.structs import replace

from adapters.base_model import BaseModel
from kernels.handoff import UnsupportedMachine
from node_agent.coldstart.auto_workers import (
    JUDGED,
    MAX_WORKERS,
    PLANS,
    is_judged,
    judge_calls,
    judge_link,
    refusal,
)
from node_agent.coldstart.calibration import Calibration, Interrupted, Unmeasurable, never
from node_agent.coldstart.cold_starts import WorkersDecision
from node_agent.coldstart.cost_check import RETRY_S, CostCheck, Pause
from node_agent.coldstart.judgement import DECISION_ROUNDS, Judgement
from node_agent.coldstart.learning import engine_correction
from node_agent.coldstart.measure import SHORT, measure
from node_agent.coldstart.pass_times import ROUNDS, CallKind
from node_agent.coldstart.profile import Profile, ProfileFile
from node_agent.coldstart.setup import check_handoff, profile_key
from node_agent.coldstart.stream import StreamPool
from node_agent.coldstart.worker_start import (
    check_count,
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
TURN_S = 1.0
"""Seconds after which a piece of a judgement measures no further call, so that other idle work gets its turn."""
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
        self._is_open = self._serves = False
        self._link = WorkersDecision(0, "")
        """decision before calls were measured, by the link alone or by the settings"""
        self._starting: WorkerPool | None = None
        """workers of the open judgement, which start or are measured; None: they must be started"""
        self._judgement: Judgement | None = None
        """calls measured so far with the workers of the open judgement"""
        self._warm_by: float | None = None
        """monotonic time until which the open judgement waits for workers that are not warm; None: all were warm"""
        self._judge_pause, self._kinds_pause = Pause(RETRY_S), Pause(RETRY_S)

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
        if config.cpu_workers and "assist" in starts.mode.plans:
            check_count(config, config.cpu_workers, self.threads, why)
        decision = self._decide(why)
        if decision.count:
            self._open(decision, 0)
            if self._unless_impossible(lambda: self._launch(decision.count)):
                self._judge(never, inf)
        else:
            self._conclude(decision)
        self._serves = True

    def close(self) -> None:
        """Closes workers that are still starting. The engine closes the others."""
        if self._starting is not None and self._starting is not self.starts.workers:
            self._starting.close()
            self._starting = None

    def work(self, should_yield: Callable[[], bool]) -> bool:
        """Does a piece of the measurements while the node is idle, until `should_yield` returns True. Returns False
        when there is nothing to measure now."""
        if should_yield():
            return False
        if self._is_open and self._judge_pause.over:
            return self._judge_further(should_yield)
        if self.config.cpu_workers is None and not refusal(self.config) and self._check.detect_change():
            profile = self._check.measure(should_yield)
            if profile is not None:
                self._judge_again(profile)
            return True
        starts = self.starts
        if self._kinds_pause.over and starts.decision.count and starts.unmeasured and starts.assists:
            self._measure_kind(next(iter(starts.unmeasured)), should_yield)
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

    # --- judgement

    def _open(self, link: WorkersDecision, count: int) -> None:
        """Begins a judgement of the workers that `link` allows. `count`: number of workers that count until then."""
        self._is_open, self._link, self._judgement, self._warm_by = True, link, None, None
        self.starts.decision = WorkersDecision(count, "")
        self._report_open("workers are starting")

    def _conclude(self, decision: WorkersDecision) -> None:
        """Ends the judgement with this decision. Stores and reports it, and ends the workers if it is for none."""
        self._is_open, self._judgement, self._judge_pause = False, None, Pause(RETRY_S)
        if decision.count:
            self._starting = None
        else:
            self._end_workers()
        self.starts.decision = decision
        self._write()
        self._report()

    def _put_off(self, why: str) -> None:
        """Leaves the judgement open for another attempt, after a pause that grows."""
        self._report_open(f"{why}; tried again while the node is idle")
        self._write()
        seconds = self._judge_pause.lengthen()
        log.warning("CPU workers are not decided yet", extra={"reason": why, "next_try_s": seconds})

    def _report_open(self, why: str) -> None:
        """Sets the decision that is reported while the judgement is open. Its reason says why."""
        begin = "not judged yet" if self.config.cpu_workers is None else "not there yet"
        count = 0 if self.starts.workers is None else self.starts.decision.count
        self.starts.decision = WorkersDecision(count, f"{begin}: {why}; {self._link.reason}", self._link.figures)

    def _judge(self, should_yield: Callable[[], bool], until: float) -> None:
        """Measures typical calls with the current workers until the monotonic time `until`. Once all are measured,
        keeps as many workers as are useful. If the settings fix their number, the calls are measured later, like those
        of other kinds."""
        starts, config = self.starts, self.config
        if config.cpu_workers is not None:
            starts.unmeasured |= dict.fromkeys(JUDGED)
            self._conclude(self._link)
            return
        was_judged = self._judgement is None and is_judged(starts.times)  # before the last restart
        try:
            is_done = was_judged or self._measure_calls(should_yield, until)
        except Unmeasurable as error:
            self._conclude(WorkersDecision(0, f"{error}; {self._link.reason}", self._link.figures))
            return
        except Interrupted as interrupted:
            if should_yield():
                self._judge_pause.begin(RETRY_S)
            else:
                self._put_off(str(interrupted))
            return
        if is_done and starts.workers is not None:
            self._conclude(judge_calls(starts.times, starts.workers.limit, self._link))

    def _measure_calls(self, should_yield: Callable[[], bool], until: float) -> bool:
        """Measures the calls that decide on the number of workers. Returns whether all are measured; then they are in
        the engine's PassTimes. Raises Interrupted; finished calls are kept for the next attempt."""
        pool = self.starts.workers
        assert pool is not None
        if self._judgement is None:
            self._judgement = Judgement(pool.layout.workers, self.config.max_cold)
        judgement, calibration = self._judgement, Calibration(self.engine, self.base, should_yield)
        if judgement.best is None:
            if not judgement.measure(calibration, pool, until):
                return False
            best = judgement.choose_count()
            if best < pool.layout.workers and not self._serves:  # on a serving node, starting some would delay calls
                self._end_workers()
                if not self._unless_impossible(lambda: self._launch(best)):
                    return False
                pool = self.starts.workers
        assert pool is not None and judgement.best is not None
        if not judgement.measure(calibration, pool, until):
            return False
        if pool.limit != judgement.best:
            self.starts.times.forget("assist")  # measured meanwhile with another number
            pool.limit = judgement.best
        for sample in judgement.times.samples:
            self.starts.times.add(sample)
        return True

    # --- while idle

    def _judge_again(self, profile: Profile) -> None:
        """Begins a judgement by a profile with changed costs, and stores the profile."""
        starts = self.starts
        if starts.profile is not None and profile.layer is not starts.profile.layer:
            starts.device = engine_correction()  # the new profile contains what it had learnt
        starts.use(profile, starts.workers)
        self._judge_pause = Pause(RETRY_S)
        self._begin_judgement()

    def _begin_judgement(self) -> None:
        """Decides on the workers by the profile. Closes them, starts new ones, or has the existing ones measured
        again."""
        workers = self.starts.workers
        decision = self._decide(refusal(self.config))
        if workers is not None and workers.layout.workers < decision.count:
            self._end_workers()  # more may gain now
            workers = None
        if not decision.count:
            self._conclude(decision)
            return
        self._open(decision, 0 if workers is None else min(workers.limit, decision.count))
        if workers is not None:
            self._starting = workers
        else:
            self._unless_impossible(lambda: self._begin_start(decision.count))
        self._write()

    def _begin_start(self, count: int) -> None:
        """Starts workers without waiting for them. Raises ValueError, UnsupportedMachine."""
        self._starting = self._make(count)
        self._starting.start()

    def _judge_further(self, should_yield: Callable[[], bool]) -> bool:
        """Does a piece of the open judgement: starts workers, measures their costs, or measures calls with them.
        Returns False while it waits until they are warm."""
        pool = self._starting
        if pool is None:
            self._begin_judgement()
            return True
        if not self._is_ready(pool):
            return False
        if not pool.usable:
            if pool is not self.starts.workers:
                self._end_workers()  # those in use are restarted by their pool
            self._warm_by = None
            self._put_off(f"they were not warm within {START_LIMIT_S:.0f} s")
        elif self._has_costs(pool) or self._unless_impossible(lambda: self._adopt(pool)):
            self._report_open("calls with them are measured while the node is idle")
            self._judge(should_yield, time.monotonic() + TURN_S)
        return True

    def _is_ready(self, pool: WorkerPool) -> bool:
        """Returns whether all workers are warm, or START_LIMIT_S have passed since not all were."""
        if pool.wait_ready(0.0) >= pool.layout.workers:
            self._warm_by = None
            return True
        now = time.monotonic()
        if self._warm_by is None:
            self._warm_by = now + START_LIMIT_S
        return now >= self._warm_by

    def _has_costs(self, pool: WorkerPool) -> bool:
        """Returns whether cold starts use this pool, and its workers' costs are known."""
        profile = self.starts.profile
        return self.starts.workers is pool and profile is not None and profile.cpu is not None

    def _unless_impossible(self, start: Callable[[], object]) -> bool:
        """Calls `start`, which starts workers. Returns whether it succeeded.

        If the machine can't have workers, ends the judgement: the node serves without them. If the settings fix their
        number and the node does not serve yet, raises ValueError, UnsupportedMachine. If something is short, puts the
        judgement off; raises OSError instead if the node does not serve yet.
        """
        try:
            return start() is not False
        except (Interrupted, OSError) as error:
            if isinstance(error, OSError) and not self._serves:
                raise
            self._put_off(str(error))
            return False
        except (ValueError, UnsupportedMachine) as error:
            if self.config.cpu_workers is not None and not self._serves:
                raise
            log.error("CPU workers can't be used", extra={"reason": str(error)})
            self._conclude(WorkersDecision(0, str(error)))
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
            self._kinds_pause.begin(RETRY_S)
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

    def _launch(self, count: int) -> bool:
        """Starts `count` workers and waits until they are warm. Returns whether any answers. Raises ValueError when the
        handoff does not work."""
        pool = self._starting = self._make(count)
        start_warm(pool, START_LIMIT_S)
        return self._adopt(pool)

    def _adopt(self, pool: WorkerPool) -> bool:
        """Makes cold starts use the pool's workers, and measures their costs if the profile lacks them. Returns whether
        any worker answers; if none does, ends them and puts the judgement off. Raises ValueError when the handoff does
        not work."""
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
            self._end_workers()
            self._put_off("none answered while they were measured")
            return False
        starts.use(replace(profile, passes=starts.times.samples), pool)
        return True

    def _end_workers(self) -> None:
        """Ends the workers, including those that are starting."""
        starts = self.starts
        if self._starting is not None:
            self._starting.close()
            self._starting = None
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
