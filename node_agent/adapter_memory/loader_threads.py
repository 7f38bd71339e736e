"""Pool of threads that serves the jobs of loads round robin, one piece of work at a time.

While a more urgent job is unfinished, less urgent ones get no work. Among equally urgent jobs, those with a request in
the batch go before those with queued requests alone. Among these, tenants take turns, however many jobs each has.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

from node_agent.adapter_memory.priority import Priority

MAX_WAIT_S = 60.0
"""Seconds after which an idle thread looks for work even if nobody woke it."""
CLOSE_SECONDS = 30.0


class Load(Protocol):
    """Urgency of a job. A thread that changes it must call LoaderThreads.wake."""

    priority: Priority
    leased: bool
    """whether a request in the batch waits for the load; it then goes before others of its priority"""
    tenant: str
    """tenant whose request or prefetch wanted the load last; empty if no tenant did"""


class Job(Protocol):
    """Work of one load in one tier. Its methods are called under the lock of the threads and must not block."""

    @property
    def load(self) -> Load:
        """Load that the job belongs to."""

    @property
    def over(self) -> bool:
        """Returns whether no work remains or runs. The threads then drop the job."""

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:
        """Returns the next piece of work; None when none is ready. `is_blocked`: whether a more urgent job is
        unfinished; this job may then finish its work but starts nothing new.

        Neither this method nor the work may raise.
        """

    def wake_at(self) -> float | None:
        """Returns the time, in monotonic seconds, at which `take` must be called again although nobody called `wake`.
        None: never."""


class LoaderThreads:
    """Pool of at most `count` threads, started on demand. State of jobs changes only under the lock `changed`."""

    def __init__(self, name: str, count: int, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` is called first in each thread."""
        self.name, self.count, self._prepare = name, count, prepare
        self.changed = threading.Condition()
        self.closed = False
        self._cores = os.sched_getaffinity(0)
        """Cores on which the thread that created the pool may run. Loader threads use them too. Otherwise they would
        inherit the engine thread's reserved cores."""
        self._jobs: list[Job] = []
        self._turns: dict[str, int] = {}
        """number of the last piece of work of each tenant that has jobs"""
        self._last_number = 0
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def add(self, job: Job) -> None:
        with self.changed:
            self._jobs.append(job)
            self._call_one()

    def wake(self) -> None:
        """Wakes a thread, since a job may have new work."""
        with self.changed:
            self._call_one()

    def close(self, wait: bool) -> None:
        """Starts no more work. With `wait`, returns once the running work has ended; raises RuntimeError after
        CLOSE_SECONDS."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise RuntimeError(f"{thread.name} still runs {CLOSE_SECONDS:.0f} s after the loader was closed")

    def _call_one(self) -> None:
        """Wakes an idle thread, or starts a thread. The caller holds the lock. One is enough: a thread that finds work
        calls the next."""
        if self._idle:
            self.changed.notify()
        elif len(self._threads) < self.count and not self.closed:
            name = f"{self.name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()

    def _serve(self) -> None:
        os.sched_setaffinity(0, self._cores)
        self._prepare()
        while work := self._next():
            work()

    def _next(self) -> Callable[[], None] | None:
        with self.changed:
            while not self.closed:
                work = self._take()
                if work is not None:
                    self._call_one()
                    return work
                now = time.monotonic()
                first = self._first()
                dues = (job.wake_at() for job in self._jobs if job.load.priority <= first)
                wake_at = min((at for at in dues if at is not None), default=now + MAX_WAIT_S)
                self._idle += 1
                self.changed.wait(min(max(0.0, wake_at - now), MAX_WAIT_S))
                self._idle -= 1
            return None

    def _take(self) -> Callable[[], None] | None:
        """Returns the next piece of work; None if no job has any. The most urgent jobs go first, and among them those
        whose load is `leased`, and then those of the tenant whose last turn is the longest ago. The chosen job is
        moved after the others of its priority."""
        work, count = None, -1
        while work is None and count != len(
            self._jobs
        ):  # repeat if a job has ended: less urgent jobs may have work now
            count = len(self._jobs)
            work = self._take_once()
            self._jobs = [job for job in self._jobs if not job.over]
        tenants = {job.load.tenant for job in self._jobs}
        self._turns = {tenant: number for tenant, number in self._turns.items() if tenant in tenants}
        return work

    def _take_once(self) -> Callable[[], None] | None:
        now, first = time.monotonic(), self._first()
        for job in sorted(self._jobs, key=lambda job: (not job.load.leased, self._turns.get(job.load.tenant, 0))):
            work = job.take(now, is_blocked=job.load.priority > first)
            if work is not None:
                self._last_number += 1
                self._turns[job.load.tenant] = self._last_number
                self._jobs.remove(job)
                self._jobs.append(job)
                return work
        return None

    def _first(self) -> Priority:
        """Returns the priority of the most urgent unfinished job."""
        return min((job.load.priority for job in self._jobs if not job.over), default=Priority.REQUEST)
