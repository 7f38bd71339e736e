"""Single pieces of work, each as urgent as the load that it is for. Loads that no request waits for get some of the
threads only: a store that hangs may keep these for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from node_agent.adapter_memory.loader_threads import Load, LoaderThreads, Priority


class Tasks(LoaderThreads):
    def __init__(self, name: str, count: int, max_ahead: int) -> None:
        """Prepares a pool of `count` threads. Work for a load that is less urgent than requests begins while fewer than
        `max_ahead` are busy for such loads, and no more urgent work runs."""
        super().__init__(name, count)
        self.max_ahead = max_ahead
        self.ahead = 0
        """threads that are busy for such loads; changed under `changed` alone"""

    def submit(self, load: Load, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Has a thread call the work. The work never begins once the threads are closed; then nothing sets its
        result."""
        return self._submit(_Task(self, load, lambda: work(*arguments), follows=False))

    def follow(self, load: Load, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Has a thread call the work as `submit` does, for work that belongs to some which has begun: it stands behind
        nothing."""
        return self._submit(_Task(self, load, lambda: work(*arguments), follows=True))

    def _submit(self, task: _Task) -> Future[Any]:
        self.add(task)
        return task.result


class _Task:
    """A Job of one piece."""

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
        except BaseException as error:  # the border of a thread: it belongs to the caller that waits for the result
            self._end()
            self.result.set_exception(error)
        else:
            self._end()
            self.result.set_result(outcome)

    def _end(self) -> None:
        with self._tasks.changed:
            self.over = True
            self._tasks.ahead -= self._is_ahead
