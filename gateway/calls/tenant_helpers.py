"""Helper processes that run tenants' programs, such as chat templates and forms of answers.

A tenant uses one process at a time, so that others find one while a slow program runs. A program whose process was
killed is not tried again for a while.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from adapters.helper_process import HelperProcess
from cluster.errors import ServiceError
from gateway.calls.setbacks import Key, Setbacks, key_of
from gateway.catalog.threads import LeavableThreads
from gateway.places.places import Places, working_for

T = TypeVar("T")


class ProgramKilled(Exception):
    """The process that ran the program was killed, broke, or had to be replaced. The text says why, and may be shown to
    the caller."""


class TenantHelpers:
    """Helper processes of one module in one gateway worker."""

    def __init__(self, module: str, places: Places, what: str) -> None:
        """`places`: one per process. `what`: name of a program in messages."""
        self._threads, self._what = LeavableThreads(places), what
        self._helpers = [HelperProcess(module) for _ in range(places.pool.size)]
        self._idle = deque(self._helpers)
        """Processes without a job, the last used one at the end. It is used next, so that few processes start."""
        self._setbacks = Setbacks(time.monotonic)

    def close(self) -> None:
        """Kills the processes, and abandons their jobs."""
        for helper in self._helpers:
            helper.kill()

    async def run(self, tenant: str, program: str, job: Callable[[HelperProcess], T]) -> T:
        """Returns the result of `job`, which blocks, with one of the processes.

        Raises ServiceError `overloaded` while the program is not tried because it was killed, and the exceptions of
        `job`; ProgramKilled counts as a kill.
        """
        key = key_of(tenant, program)
        self._check_pause(key)
        with working_for(tenant):
            return await self._threads.run(lambda: self._try(key, job))

    def _check_pause(self, key: Key) -> None:
        """Raises ServiceError `overloaded` while the program is not tried."""
        if (pause := self._setbacks.pause(key)) is not None:
            seconds, why = pause
            message = f"{self._what} is not tried for another {math.ceil(seconds)} s, because {why}"
            raise ServiceError("overloaded", message, retry_after=seconds)

    def _try(self, key: Key, job: Callable[[HelperProcess], T]) -> T:
        """Runs the job, and records what became of the program. Blocks."""
        self._check_pause(key)  # an earlier job may have been killed while this one waited
        helper = self._idle.pop()
        try:
            result = job(helper)
        except ProgramKilled as killed:
            self._setbacks.record_kill(key, str(killed))
            raise
        finally:
            self._idle.append(helper)
        self._setbacks.record_success(key)
        return result
