"""Starts a node's CPU LoRA workers, and measures cold calls with them.

It measures at the node's start. While the node is idle, it measures again after the link has changed, or after calls of
an unmeasured kind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from adapters.base_model import BaseModel
from cluster.json_file import write_json
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
from node_agent.coldstart.learning import LearntLink
from node_agent.coldstart.measure import SHORT, measure
from node_agent.coldstart.pass_times import ROUNDS, CallKind
from node_agent.coldstart.profile import Profile, ProfileError, check, read_profile
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
LINK_MOVED = 4 / 3
"""Factor by which the link's learned bandwidth must change before the node reconsiders its number of workers."""
JUDGE_PAUSE_S = 60.0
"""Minimum seconds between two decisions on the workers because of a changed link. On a busy host the measurement's own
loads can change the learned bandwidth."""
RETRY_S = 30.0
"""Seconds before another attempt after an interrupted measurement."""
ABOUT_AS_FAST = 1.05
"""Factor within which the time to first token with fewer workers counts as equally good."""
DECISION_ROUNDS = 8
"""Number of calls of each plan that are measured to decide whether to use workers, or to narrow the bounds of a kind of
call."""
CONFIRM_ROUNDS = 5
"""Number of pipelined calls that are measured to confirm that the link has changed."""
BURST_ROUNDS = 3
"""Number of bursts of concurrent calls of each plan that are measured for the same decision."""
ALL_PLANS = ("wait", *PLANS)


class WorkerManager:
    """Starts, measures and replaces the CPU workers of one engine. Only the engine's thread calls it."""

    def __init__(self, engine: Engine, config: EngineConfig, base: BaseModel, threads: int) -> None:
        """`threads`: torch threads of the engine while no worker is armed."""
        self.engine, self.config, self.base, self.threads = engine, config, base, threads
        self.starts = engine.cold_start
        self._file = Path(config.profile) if config.profile else None
        self._key = profile_key(engine, config, base)
        self._judged_rate, self._judge_at = 0.0, 0.0
        self._starting: WorkerPool | None = None
        """workers that are starting, or are measured again, while the node serves"""
        self._warm_by = 0.0
        self._retry_at = 0.0

    def start(self) -> None:
        """Reads or measures the node's profile and starts the workers. Raises ValueError when the number of workers in
        the settings is impossible."""
        config, starts = self.config, self.starts
        if starts.mode.plans == ("wait",):
            starts.decision = WorkersDecision(0, f"cold_start: {config.cold_start} has no use for them")
            return
        stored = self._read()
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
        if time.monotonic() < self._retry_at or should_yield():
            return False
        if self._starting is not None:
            return self._finish_start(self._starting, should_yield)
        if self._link_has_moved():
            if self._confirm_link(should_yield):
                self._judge_link_again()
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
        self._judged_rate = profile.link.bandwidth
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
            seconds[count] = median(s.first for s in times.of(TYPICAL, "assist"))
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

    def _link_has_moved(self) -> bool:
        """Returns whether the link's learned bandwidth has changed by the factor LINK_MOVED since the last decision on
        workers. Returns False within JUDGE_PAUSE_S seconds of a decision made for this reason."""
        if self.config.cpu_workers is not None or self.starts.link is None or not self._judged_rate:
            return False
        if refusal(self.config) or time.monotonic() < self._judge_at:
            return False
        rate = self.starts.link.cost.bandwidth / self._judged_rate
        return not 1 / LINK_MOVED < rate < LINK_MOVED

    def _confirm_link(self, should_yield: Callable[[], bool]) -> bool:
        """Returns whether the link has changed by loads that are measured now, while the node is idle.

        Loads of requests also take longer if the host is busy. Without this check a node would drop its measured calls,
        and perhaps its workers, although the link is the same. Returns False if the measurement was interrupted.
        """
        starts = self.starts
        assert starts.profile is not None
        learnt, starts.link = starts.link, LearntLink(starts.profile.link)
        try:
            Calibration(self.engine, self.base, should_yield).measure(TYPICAL, ("pipeline",), CONFIRM_ROUNDS)
        except Interrupted as interrupted:
            log.info("the link could not be measured again", extra={"reason": str(interrupted)})
            starts.link = learnt  # the loads of requests are all that is known of it
            self._retry_at = time.monotonic() + RETRY_S
            return False
        if self._link_has_moved():
            return True
        self._judge_at = time.monotonic() + JUDGE_PAUSE_S
        return False

    def _judge_link_again(self) -> None:
        """Decides on the workers again, by the link's current cost: closes them, starts new ones, or has the existing
        ones measured again."""
        starts = self.starts
        assert starts.profile is not None and starts.link is not None
        cost, workers = starts.link.cost, starts.workers
        log.info("the link to the device has changed", extra={"bytes_per_second": round(cost.bandwidth)})
        starts.use(replace(starts.profile, link=cost, passes=()), workers)
        self._judge_at = time.monotonic() + JUDGE_PAUSE_S
        decision = self._decide("")
        there = 0 if workers is None else workers.limit
        starts.decision = WorkersDecision(min(there, decision.count), decision.reason, decision.figures)
        if not decision.count:
            self._end_workers()
            self._report()
        elif workers is None:
            self._unless_impossible(lambda: self._begin_start(decision.count))
        else:
            self._starting = workers

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
            return True
        try:
            if self.starts.workers is not None or self._unless_impossible(lambda: self._take(pool)):
                self._judge(should_yield)
        except Interrupted:
            self._retry_at = time.monotonic() + RETRY_S
            return True
        self._starting = None
        self._write()
        self._report()
        return True

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
            self._retry_at = time.monotonic() + RETRY_S
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
        self._take(pool)

    def _take(self, pool: WorkerPool) -> bool:
        """Makes cold starts use the pool's workers, and measures their costs if the profile lacks them. Returns whether
        any worker answers; if none does, closes the pool. Raises ValueError when the handoff does not work."""
        starts, count = self.starts, pool.layout.workers
        assert starts.profile is not None
        if isinstance(pool, StreamPool) and pool.usable:
            check_handoff(pool)
        profile = starts.profile
        if profile.cpu is None or profile.key.workers != count:
            starts.times.forget("assist")  # other numbers of workers have other times
            cpu, handoff = measure_workers(starts.store, pool)
            profile = replace(profile, key=replace(profile.key, workers=count), cpu=cpu, handoff=handoff)
        if profile.cpu is not None and isinstance(pool, StreamPool):
            profile = prepare_handoffs(self.engine.runner, self.engine.blocks, profile)
        if profile.cpu is None:
            log.warning("cold starts go without CPU workers: none answered while they were measured")
            starts.decision = WorkersDecision(0, "none answered while they were measured")
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

    def _read(self) -> Profile | None:
        if self._file is None or not self._file.exists():
            return None
        try:
            return read_profile(self._file, self._key)
        except (ProfileError, OSError) as error:
            log.warning("the profile is measured again", extra={"reason": str(error)})
            return None

    def _write(self) -> None:
        """Writes the profile for the next start, if it has a file. A failure is logged; the next start then measures
        again."""
        if self._file is None or self.starts.profile is None:
            return
        profile, workers = self.starts.profile, self.starts.workers
        count = profile.key.workers if workers is None else workers.limit
        profile = replace(profile, key=replace(profile.key, workers=count), passes=self.starts.times.samples)
        try:
            check(profile)  # a worker that does not answer now may do so later
            write_json(profile, self._file)
        except (ProfileError, OSError) as error:
            log.warning("the profile is not kept", extra={"reason": str(error)})

    def _report(self) -> None:
        decision = self.starts.decision
        log.info(
            "CPU workers",
            extra={"workers": decision.count, "reason": decision.reason, "milliseconds": dict(decision.figures)},
        )
