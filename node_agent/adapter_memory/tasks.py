"""Single pieces of work, each as urgent as the load that it is for. Loads that no request waits for get some of the
threads only: a store that hangs may keep these for long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from node_agent.adapter_memory.loader_threads import LoaderThreads, Priority


class Load(Protocol):
    """What a piece of work is for; its properties are those of a Job."""

    @property
    def priority(self) -> Priority: ...

    @property
    def leased(self) -> bool: ...


class Tasks:
    def __init__(self, name: str, count: int, most_ahead: int) -> None:
        """`count`: threads. Work for a load that is less urgent than requests begins while less than `most_ahead` are
        busy for such loads, and no more urgent work goes on."""
        self.threads, self.most_ahead = LoaderThreads(name, count), most_ahead
        self.ahead = 0
        """threads that are busy for such loads; changed under the threads' lock"""

    def submit(self, load: Load, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """Has a thread call the work. It never begins once the threads are closed; then nothing sets its result."""
        return self._add(_Task(self, load, lambda: work(*arguments), follows=False))

    def follow(self, load: Load, work: Callable[..., Any], *arguments: object) -> Future[Any]:
        """As `submit`, of work that belongs to some which has begun: it stands behind nothing."""
        return self._add(_Task(self, load, lambda: work(*arguments), follows=True))

    def wake(self) -> None:
        """Loads have become more or less urgent."""
        self.threads.wake()

    def close(self) -> None:
        self.threads.close(wait=False)

    def _add(self, task: _Task) -> Future[Any]:
        self.threads.add(task)
        return task.result


class _Task:
    """A Job of one piece."""

    def __init__(self, tasks: Tasks, load: Load, work: Callable[[], Any], *, follows: bool) -> None:
        self._tasks, self._load, self._work, self._follows = tasks, load, work, follows
        self._begun = self._is_ahead = False
        self.over = False
        self.result: Future[Any] = Future()

    @property
    def priority(self) -> Priority:
        return self._load.priority

    @property
    def leased(self) -> bool:
        return self._load.leased

    def take(self, now: float, held: bool) -> Callable[[], None] | None:  # noqa: ARG002 - a Job's signature
        if self._begun:
            return None
        is_ahead = self.priority > Priority.REQUEST
        waits = held or (is_ahead and self._tasks.ahead >= self._tasks.most_ahead)
        if waits and not self._follows:
            return None
        self._begun, self._is_ahead = True, is_ahead
        self._tasks.ahead += is_ahead
        return self._run

    def due(self) -> None:
        return None

    def _run(self) -> None:
        try:
            found = self._work()
        except BaseException as error:  # the border of a thread: it belongs to whoever waits for the result
            self._end()
            self.result.set_exception(error)
        else:
            self._end()
            self.result.set_result(found)

    def _end(self) -> None:
        with self._tasks.threads.changed:
            self.over = True
            self._tasks.ahead -= self._is_ahead
