"""Jobs of the leader, and their ticks."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

PAUSE_SECONDS = 2.0
Scope = Literal["registry", "nodes"]


class TickEnded(Exception):
    """The tick's deadline has passed, or this worker no longer leads."""


class Tick:
    """Single call of a job. `deadline` and `since` are monotonic seconds by `clock`. Safe to use from a job's
    thread."""

    def __init__(
        self, deadline: float, clock: Callable[[], float], leads: Callable[[], bool], since: float = -math.inf
    ) -> None:
        self.deadline = deadline
        self.since = since
        """Time, in monotonic seconds, since which no other worker has led."""
        self.work = 0
        """Amount of work that the job has done, in the job's own unit; shown on /metrics."""
        self._clock = clock
        self._leads = leads

    def check(self) -> None:
        """Checks that the tick may continue. Jobs call it before each change. Raises TickEnded."""
        if not self._leads() or self._clock() >= self.deadline:
            raise TickEnded


@dataclass(frozen=True)
class Job:
    """Job of the leader. `run` is called repeatedly while this worker leads.

    Each call does a bounded part of the work, and returns or raises TickEnded at the tick's deadline. The next tick
    continues the work. Two leaders may run the job at once.
    """

    name: str
    run: Callable[[Tick], Awaitable[None]]
    pause_seconds: float = PAUSE_SECONDS
    scope: Scope = "registry"
    """Gateways that share the leader of this job: all gateways of a registry, or those that know the same nodes.
    Without Redis each gateway has its own nodes."""
