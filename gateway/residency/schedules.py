"""Executes warm windows: periods, set in functions' policies, in which nodes have the function's adapters ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from adapters.choices import Choice
from adapters.schedules import forget_schedules, read_schedules
from adapters.store import ObjectStore
from adapters.warm_windows import CronProblem, WarmWindow, window_state
from gateway.catalog.adapters import adapter_of
from gateway.catalog.functions import Functions
from gateway.catalog.threads import StoreThreads
from gateway.leader.tick import Job, Tick
from gateway.residency.kept_reads import KeptReads
from gateway.residency.lookups import look_up
from gateway.residency.plan import PrewarmTarget

LOOK_SECONDS = 10.0
"""Seconds between two checks of the schedules: the maximum delay when a window opens or closes."""

log = logging.getLogger("gateway")


class WarmSchedules:
    """Warm schedules, for the leader. `unix`: Unix time."""

    def __init__(
        self,
        store: ObjectStore,
        threads: StoreThreads,
        functions: Functions,
        *,
        unix: Callable[[], float],
    ) -> None:
        self._store, self._threads, self._functions, self._unix = store, threads, functions, unix
        self._reads = KeptReads("warm windows")
        self.wishes: list[PrewarmTarget] = []
        """Current targets as of the last check; unchanged while the registry is unavailable."""
        self._states: dict[WarmWindow, tuple[bool, float]] = {}
        """State of each window: whether it is open, and the Unix time at which this changes."""

    def job(self) -> Job:
        return Job("schedules", self.check, LOOK_SECONDS, "nodes")

    async def check(self, tick: Tick) -> None:
        await self._reads.renew(self._check(tick))

    async def _check(self, tick: Tick) -> None:
        schedules = await self._threads.read(read_schedules, self._store)
        now, wishes, empty, windows = self._unix(), list[PrewarmTarget](), list[str](), set[WarmWindow]()
        async for key, choices in look_up(self._functions, list(schedules.functions), tick):
            await asyncio.sleep(0)  # finding the next time of a cron expression may take 5 ms
            tick.check()
            now_wanted = self._wishes_now(key, choices, now, windows)
            if now_wanted is None:
                empty.append(key)
            wishes += now_wanted or ()
        self.wishes = wishes
        self._states = {window: state for window, state in self._states.items() if window in windows}
        tick.work += len(wishes)
        if empty:
            await self._threads.write(forget_schedules, self._store, empty)

    def _wishes_now(
        self, key: str, choices: Sequence[Choice] | None, now: float, open_windows: set[WarmWindow]
    ) -> list[PrewarmTarget] | None:
        """Returns the function's current targets; None if its policy has no windows any more.

        Adds all windows of its policy to `open_windows`, whether they are open now or not.
        """
        if not choices:
            return None if choices is None else []
        windows = choices[0].version.policy.warm
        open_windows.update(windows)
        copies = max((window.copies for window in windows if self._update_window(key, window, now)), default=0)
        adapters = [adapter_of(choice.version) for choice in choices if choice.is_whole and copies]
        return (
            [PrewarmTarget(key, adapter, "schedule", 1.0, copies=copies) for adapter in adapters] if windows else None
        )

    def _update_window(self, key: str, window: WarmWindow, now: float) -> bool:
        """Updates the window's state if it has changed by `now`. Returns whether the window is open."""
        is_open, until = self._states.get(window, (False, now))
        if until <= now:
            try:
                is_open, until = window_state(window, now)
            except CronProblem as problem:  # stored by a newer release
                log.warning(
                    "a warm window is invalid and is ignored for an hour", extra={"function": key, "why": str(problem)}
                )
                is_open, until = False, now + 3600.0
            self._states[window] = (is_open, until)
        return is_open
