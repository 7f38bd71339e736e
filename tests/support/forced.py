"""Cold starts as they hardly ever happen: drawn plans, layers that arrive in any order at any time, workers that fail.

For exactness: whatever is forced here, the answers must be PEFT's.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from node_agent.coldstart.cold_starts import ColdStarts
from node_agent.coldstart.planner import Contention
from node_agent.coldstart.row_costs import MAX_JOINED
from node_agent.coldstart.workers import WorkerPool
from node_agent.engine.loop import Engine
from node_agent.leases import Lease
from node_agent.types import Plan

PLANS = ("wait", "pipeline", "assist")
SHORT_STOP, LONG_STOP = 0.02, 1.5
"""Seconds that a worker is stopped for: within a handoff's limit, and beyond it."""


class DrawnLink:
    """Instead of a link: each layer takes a drawn time, none or of one of the mean `rates` per second."""

    def __init__(self, rng: random.Random, rates: Sequence[float] = (500, 200, 50)) -> None:
        self._rng, self._rates, self._lock = rng, rates, threading.Lock()

    def carry(self, size: int) -> None:
        with self._lock:
            delay = self._rng.choice((0.0, *map(self._rng.expovariate, self._rates)))
        time.sleep(delay)


class ForcedStarts(ColdStarts):
    """Every plan, order and size of the assisted group is as likely as any other; `faults` is the chance that a chunk's
    beginning, or a step that is joined, meets a worker that is killed or stopped."""

    def __init__(self, inner: ColdStarts, workers: WorkerPool | None, rng: random.Random, faults: float) -> None:
        super().__init__(inner.store, inner.base, inner.mode, inner.profile, inner.workers)
        self.pool, self.rng, self.faults = workers, rng, faults
        self.plans = dict.fromkeys(PLANS, 0)
        self.kills = self.stops = self.joined = 0

    def plan(self, lease: Lease, n_tokens: int, contention: Contention) -> Plan:
        layers = self.base.num_layers
        name = self.rng.choice(PLANS if self.assists else PLANS[:2])
        self.plans[name] += 1
        self.store.set_order(lease, self.rng.sample(range(layers), layers))
        if self.rng.random() < self.faults:
            self._fail()
        slow = self.rng.choice((0.0, 1.0))  # whether a layer that comes late is worth waiting for
        return Plan(name, self.rng.randint(0, layers), 0.0, (slow,) * layers, (0.1,) * layers)

    def joining(self, waiting: Iterable[tuple[Lease, int]], others: int) -> set[str]:
        chosen: set[str] = set()
        for lease, rows in waiting:
            if len(chosen) < MAX_JOINED and self.can_step(lease) and self.rng.random() > 0.3:
                chosen.add(lease.digest)
                self.joined += rows
                if self.rng.random() < self.faults:
                    self._fail()
        return chosen

    def _fail(self) -> None:
        pids = self.pool.pids() if self.pool is not None else []
        if not pids:
            return
        pid = self.rng.choice(pids)
        with suppress(ProcessLookupError):
            if self.rng.random() < 0.5:
                self.kills += 1
                _later(self.rng.choice((0.0, 0.002)), pid, signal.SIGKILL)
            else:
                self.stops += 1
                os.kill(pid, signal.SIGSTOP)
                _later(self.rng.choice((SHORT_STOP, SHORT_STOP, LONG_STOP)), pid, signal.SIGCONT)


def force(engine: Engine, rng: random.Random, faults: float) -> ForcedStarts:
    """From now on, cold starts of this engine are drawn."""
    workers = engine.assist.workers if engine.assist is not None else None
    forced = ForcedStarts(engine.cold_start, workers, rng, faults)
    engine.cold.cold_start = forced
    engine.store.loader.device_link = DrawnLink(random.Random(rng.random()))  # type: ignore[assignment]
    return forced


def _later(seconds: float, pid: int, number: signal.Signals) -> None:
    def send() -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    timer = threading.Timer(seconds, send)
    timer.daemon = True
    timer.start()
