"""Loader threads serve the most urgent jobs first, and hold the others up while one of these is under way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.adapter_memory.priority import Priority


class Pieces:
    """A job of `left` pieces. Each writes the job's name down, and lets the test change what it wants to."""

    leased, tenant = False, ""

    def __init__(self, name: str, left: int, priority: Priority, worked: Callable[[str], None]) -> None:
        self.name, self.left, self.priority = name, left, priority
        self._worked = worked
        self.asked = 0

    @property
    def load(self) -> Pieces:
        return self

    @property
    def over(self) -> bool:
        return self.left == 0

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:
        self.asked += 1
        if is_blocked or not self.left:
            return None
        self.left -= 1
        return lambda: self._worked(self.name)

    def wake_at(self) -> float | None:
        return None


def expected_order(jobs: list[tuple[str, int, Priority]], changes: dict[int, tuple[str, Priority]]) -> list[str]:
    """Written down by hand: the line is served in turn among the most urgent; after `i` pieces `changes[i]` happens."""
    line = [[name, left, priority] for name, left, priority in jobs]
    done: list[str] = []
    while line:
        if len(done) in changes:
            name, priority = changes[len(done)]
            line = [[n, left, priority if n == name else p] for n, left, p in line]
        chosen = next(job for job in line if job[2] == min(p for _, _, p in line))
        line.remove(chosen)
        done.append(str(chosen[0]))
        chosen[1] -= 1  # type: ignore[operator]
        if chosen[1]:
            line.append(chosen)
    return done


@pytest.mark.parametrize("seed", range(20))
def test_drawn_jobs_are_served_by_priority_and_in_turn(seed: int) -> None:
    """One thread, held by a first piece until all jobs are there; priorities change between drawn pieces."""
    rng = random.Random(seed)
    drawn = [(name, rng.randint(1, 4), rng.choice(list(Priority))) for name in "abcdef"]
    count = sum(left for _, left, _ in drawn)
    changes = {rng.randrange(1, count): (rng.choice("abcdef"), rng.choice(list(Priority))) for _ in range(3)}
    threads, held, ended, done = LoaderThreads("test", 1), threading.Event(), threading.Event(), list[str]()

    def work(name: str) -> None:
        if name == "first":
            assert held.wait(30)
            return
        done.append(name)
        if len(done) in changes:
            changed, priority = changes[len(done)]
            jobs[changed].priority = priority
        if len(done) == count:
            ended.set()

    jobs = {name: Pieces(name, left, priority, work) for name, left, priority in drawn}
    threads.add(Pieces("first", 1, Priority.REQUEST, work))
    for job in jobs.values():
        threads.add(job)
    held.set()
    assert ended.wait(30)
    assert done == expected_order(drawn, changes)
    threads.close(wait=True)


class Standing:
    """A job that has no work now and ends when it is told to, as soon as it is asked."""

    leased, tenant = False, ""

    def __init__(self, priority: Priority) -> None:
        self.load, self.priority, self.over, self.may_end = self, priority, False, False

    def take(self, now: float, is_blocked: bool) -> None:
        self.over = self.may_end

    def wake_at(self) -> None:
        return None


def test_a_job_that_ends_lets_the_others_go_on_at_once() -> None:
    """The threads are woken once: not for the job that waited behind it."""
    threads, ended = LoaderThreads("test", 2), threading.Event()
    standing = Standing(Priority.REQUEST)
    threads.add(standing)
    threads.add(Pieces("a", 1, Priority.PREDICTED, lambda _: ended.set()))
    assert not ended.wait(0.05)
    standing.may_end = True
    threads.wake()
    assert ended.wait(30)
    threads.close(wait=True)


def test_a_job_that_is_held_up_is_not_asked_over_and_over() -> None:
    """Its time to be asked again has come; the threads sleep all the same until something changes."""
    threads = LoaderThreads("test", 2)
    overdue = Pieces("a", 1, Priority.PREDICTED, lambda _: None)
    overdue.wake_at = lambda: time.monotonic() - 1  # type: ignore[method-assign]
    threads.add(Standing(Priority.REQUEST))
    threads.add(overdue)
    time.sleep(0.1)
    assert overdue.asked < 20
    threads.close(wait=True)


def test_what_is_held_up_may_end() -> None:
    """A load that was given up frees its pages although a more urgent one is under way."""
    threads, given_up = LoaderThreads("test", 1), Standing(Priority.PREDICTED)
    threads.add(Standing(Priority.REQUEST))
    threads.add(given_up)
    given_up.may_end = True
    threads.wake()
    deadline = time.monotonic() + 30
    while given_up in threads._jobs:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    threads.close(wait=True)
