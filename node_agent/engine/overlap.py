"""Decode steps that are enqueued while the step before them still runs, where the runner feeds tokens on the device.

A step is followed while nobody but its rows runs: a request that comes in between waits for one step. What the step
behind computes of a request that has ended by then counts for nothing, and what the request held is free when that step
is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from node_agent.device import Event
from node_agent.engine.batch import Row, share_out
from node_agent.engine.hot import Computed, HotPasses
from node_agent.engine.request import Request
from node_agent.sending_runner import SendingRunner
from node_agent.types import ModelRunner, StepOutput


@dataclass(eq=False)
class _Step:
    """Decode rows that are enqueued."""

    rows: list[Row]
    output: StepOutput
    dropped: set[Row] = field(default_factory=set)
    """rows of requests that ended, or gave their place away, since it was enqueued"""
    started_at: float = field(default_factory=time.perf_counter)


class Overlap:
    """Steps under way, two at most. Called by the engine's thread alone."""

    def __init__(self, hot: HotPasses, runner: ModelRunner, running: Mapping[str, Request]) -> None:
        self._hot, self._running = hot, running
        self._runner = runner if isinstance(runner, SendingRunner) else None
        self._step: _Step | None = None
        self._last_end = 0.0
        """end of the last step behind which another one ran; `time.perf_counter`, 0: none did"""

    @property
    def under_way(self) -> bool:
        """Returns whether a step is to be awaited before another pass is chosen."""
        return self._step is not None

    def end_dropped(self) -> None:
        """Awaits the step that is under way if no row of it counts any more."""
        if self._step is not None and len(self._step.dropped) == len(self._step.rows):
            self._step.output.done.synchronize()  # what its rows held is awaited by those who took their places
            self._step = None

    def begin(self, rows: list[Row], n_decode: int) -> bool:
        """Enqueues a step of these rows. Returns False, doing nothing, if another could not be enqueued behind it."""
        if n_decode < len(rows) or not self._may_follow(rows):
            return False
        self._step, self._last_end = _Step(rows, self._hot.enqueue(rows)), 0.0
        return True

    def compute(self) -> tuple[Computed, Collection[Row]]:
        """Enqueues the next step, if there can be one, and awaits the one that is under way. Returns it, and which of
        its rows count for nothing. Its seconds are 0 unless it ran behind another one."""
        step = self._step
        assert step is not None
        self._step = self._follow(step)
        self._hot.await_output(step.output, len(step.rows))
        now = time.perf_counter()
        seconds = now - self._last_end if self._last_end else 0.0
        share_out(now - (self._last_end or step.started_at), step.rows)
        self._last_end = now if self._step is not None else 0.0
        return Computed(step.rows, len(step.rows), step.output, seconds), step.dropped or ()

    def drop(self, request: Request) -> list[Event]:
        """The request has ended, or gives its place away. Returns the events at which what it holds is free."""
        step = self._step
        rows = [] if step is None else [row for row in step.rows if row.request is request]
        if step is None or not rows:
            return []
        step.dropped.update(rows)
        return [step.output.done]

    def _follow(self, step: _Step) -> _Step | None:
        """Enqueues the step behind one that has not ended. Returns None where there can't be one now."""
        at = [i for i, row in enumerate(step.rows) if row not in step.dropped]
        if not self._may_follow([step.rows[i] for i in at]):
            return None
        at = [i for i in at if _goes_on(step.rows[i].request)]
        if not at:
            return None
        rows = [Row(step.rows[i].request, 1, ahead=1) for i in at]
        return _Step(rows, self._hot.enqueue(rows, fed=at))

    def _may_follow(self, rows: list[Row]) -> bool:
        """Returns whether another step may follow one of these rows. The runner must feed tokens, and nobody else may
        run who would have to wait. No row's scores may depend on a token that only the device knows, and nobody may
        have a promised time between tokens, for which others might sit a pass out."""
        if self._runner is None or not self._runner.feeds:
            return False
        requests = [row.request for row in rows]
        promised = any(request.slo_class == "strict" and request.tpot is not None for request in requests)
        return len(requests) == len(self._running) and not promised and all(r.rules is None for r in requests)


def _goes_on(request: Request) -> bool:
    """Returns whether it wants a token behind the one that is being computed; it may end by that one."""
    return request.generated + 1 < request.max_tokens
