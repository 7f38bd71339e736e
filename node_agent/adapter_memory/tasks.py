"""Threads for single tasks, each with the urgency of its load. Tasks of loads without a waiting request get only some
of the threads, since a hanging store may block them for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from node_agent.adapter_memory.loader_threads import Load, LoaderThreads
from node_agent.adapter_memory.priority import Priority


class Tasks(LoaderThreads):
    """Pool of threads for single calls."""

    def __init__(self, name: str, count: int, max_ahead: int) -> None:
        """Prepares a pool of `count` threads. At most `max_ahead` of them run tasks of prefetches at once. Such a task
        starts only while no more urgent one is pending."""
        super().__init__(name, count)
        self.max_ahead = max_ahead
        self.ahead = 0
        """number of threads that run tasks of prefetches; changed only under the lock `changed`"""

    def submit(self, load: Load, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Runs the work in a thread, and returns the future of its result. After the threads are closed, the work never
        starts and the future never gets a result."""
        return self._submit(_Task(self, load, lambda: work(*arguments), follows=False))

    def follow(self, load: Load, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Runs a task that belongs to one that is already running, and returns its future. Unlike with `submit`, it
        does not wait for more urgent tasks."""
        return self._submit(_Task(self, load, lambda: work(*arguments), follows=True))

    def _submit(self, task: _Task) -> Future[Any]:
        self.add(task)
        return task.result


class _Task:
    """Job that consists of a single call."""

    def __init__(self, tasks: Tasks, load: Load, work: Callable[[], Any], *, follows: bool) -> None:
        self.load, self._tasks, self._work, self._follows = load, tasks, work, follows
        self._is_started = self._is_ahead = False
        self.over = False
        self.result: Future[Any] = Future()

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:  # noqa: ARG002 - a Job's signature
        if self._is_started:
            return None
        is_ahead = self.load.priority > Priority.REQUEST
        waits = is_blocked or (is_ahead and self._tasks.ahead >= self._tasks.max_ahead)
        if waits and not self._follows:
            return None
        self._is_started, self._is_ahead = True, is_ahead
        self._tasks.ahead += is_ahead
        return self._run

    def wake_at(self) -> None:
        return None

    def _run(self) -> None:
        try:
            outcome = self._work()
        except BaseException as error:  # thread boundary: the caller that waits for the result gets the error
            self._end()
            self.result.set_exception(error)
        else:
            self._end()
            self.result.set_result(outcome)

    def _end(self) -> None:
        with self._tasks.changed:
            self.over = True
            self._tasks.ahead -= self._is_ahead
