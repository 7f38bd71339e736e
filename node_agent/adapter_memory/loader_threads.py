"""Threads that serve the jobs of loads in turn: a piece of work from each, so that no job keeps the others out. While a
more urgent job is under way, less urgent ones get nothing; of equally urgent ones, those come first that requests in
the batch wait for, and not only requests in the queue."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch

LONGEST_WAIT = 60.0
"""Seconds after which an idle thread looks again, whatever happens."""
CLOSE_SECONDS = 30.0


class Priority(IntEnum):
    """Urgency of a load; the lower number goes first."""

    REQUEST = 0
    ORDER = 1
    """an operator's prefetch"""
    PREDICTED = 2
    """a prefetch for a call that is only forecast"""


class Load(Protocol):
    """Urgency of a job. A thread that changes it calls `wake`."""

    priority: Priority
    leased: bool
    """A request with a place in the batch waits for it: it goes before others of its priority."""


class Job(Protocol):
    """Work of a load in one tier. Its methods are called under the threads' lock, and never block."""

    @property
    def load(self) -> Load:
        """The load that the job is a part of."""

    @property
    def over(self) -> bool:
        """Returns whether no work remains and none runs: the threads forget the job."""

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:
        """Returns the next piece of work, or None when there is none yet. `is_blocked`: a more urgent job is under way,
        and this one begins nothing; it may end. Must not raise, nor must the work."""

    def wake_at(self) -> float | None:
        """Returns the time at which `take` should be asked again without a `wake` (monotonic seconds), or None."""


class LoaderThreads:
    """Pool of at most `count` threads, started as they are needed. A job's state is changed under `changed` alone."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self.changed = threading.Condition()
        self.closed = False
        self._cores = os.sched_getaffinity(0)
        """cores of the thread that made the pool; a loader thread would inherit the engine's, which has cores for
        itself"""
        self._jobs: list[Job] = []
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def add(self, job: Job) -> None:
        with self.changed:
            self._jobs.append(job)
            self._call_one()

    def wake(self) -> None:
        """Wakes a thread: a job may have work that it did not have before."""
        with self.changed:
            self._call_one()

    def close(self, wait: bool) -> None:
        """Begins no more work; with `wait`, returns when what runs has ended. Raises RuntimeError when it does not."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads if wait else ():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise RuntimeError(f"{thread.name} still works {CLOSE_SECONDS:.0f} s after it was told to end")

    def _call_one(self) -> None:
        """Wakes an idle thread, or starts one. Called under the lock. One is enough: who finds work calls the next."""
        if self._idle:
            self.changed.notify()
        elif len(self._threads) < self.count and not self.closed:
            name = f"{self.name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()

    def _serve(self) -> None:
        os.sched_setaffinity(0, self._cores)
        # Of this thread alone. Had each loader a team of OpenMP threads, there would be more of them than cores, and
        # then the engine's own ones sleep between two products instead of polling for the next.
        torch.get_num_threads()  # or a thread's first product would take over the number that another thread set last
        torch.set_num_threads(1)
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
                wake_at = min((at for at in dues if at is not None), default=now + LONGEST_WAIT)
                self._idle += 1
                self.changed.wait(min(max(0.0, wake_at - now), LONGEST_WAIT))
                self._idle -= 1
            return None

    def _take(self) -> Callable[[], None] | None:
        """Takes the next piece of work. The first of the most urgent jobs that has work, of leased ones before others,
        goes to the end of the line. Returns None when no job has work."""
        work, count = None, -1
        while work is None and count != len(self._jobs):  # once more where one ended: others may have work then
            count = len(self._jobs)
            work = self._take_once()
            self._jobs = [job for job in self._jobs if not job.over]
        return work

    def _take_once(self) -> Callable[[], None] | None:
        now, first = time.monotonic(), self._first()
        for job in sorted(self._jobs, key=lambda job: not job.load.leased):
            work = job.take(now, is_blocked=job.load.priority > first)
            if work is not None:
                self._jobs.remove(job)
                self._jobs.append(job)
                return work
        return None

    def _first(self) -> Priority:
        """Returns the priority of the most urgent job that is not over."""
        return min((job.load.priority for job in self._jobs if not job.over), default=Priority.REQUEST)
