"""Decode steps that are enqueued while the previous step still runs. The runner must feed tokens: a chosen token
becomes the next step's input on the device.

A step is enqueued ahead only while all running requests are in the running step, so that a new request waits for at
most one step. Results for a request that has meanwhile ended are discarded, and its resources are freed once the step
has ended.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from node_agent.device_event import Event
from node_agent.engine.hot import Computed, HotPasses
from node_agent.engine.request import Request
from node_agent.engine.rows import Row, share_out
from node_agent.sending_runner import SendingRunner
from node_agent.types import ModelRunner, StepOutput


@dataclass(eq=False)
class _Step:
    """Enqueued decode step."""

    rows: list[Row]
    output: StepOutput
    dropped: set[Row] = field(default_factory=set)
    """rows of requests that have ended or were preempted since the step was enqueued"""
    started_at: float = field(default_factory=time.perf_counter)


class Overlap:
    """Decode steps that are enqueued on the device, at most two at once. Only the engine's thread calls it."""

    def __init__(self, hot: HotPasses, runner: ModelRunner, running: Mapping[str, Request]) -> None:
        self._hot, self._running = hot, running
        self._runner = runner if isinstance(runner, SendingRunner) else None
        self._step: _Step | None = None
        self._last_end = 0.0
        """end of the last step, in seconds of `time.perf_counter`, if another step was enqueued behind it; else 0"""

    @property
    def under_way(self) -> bool:
        """Returns whether a step is running, which must be awaited before another pass is chosen."""
        return self._step is not None

    def end_dropped(self) -> None:
        """Waits for the running step if all its rows were dropped."""
        if self._step is not None and len(self._step.dropped) == len(self._step.rows):
            self._step.output.done.synchronize()  # requests that took over its resources depend on its end
            self._step = None

    def begin(self, rows: list[Row], n_decode: int) -> bool:
        """Enqueues a step of these rows. Returns False, without enqueueing, if no other step could follow it."""
        if n_decode < len(rows) or not self._may_follow(rows):
            return False
        self._step, self._last_end = _Step(rows, self._hot.enqueue(rows)), 0.0
        return True

    def compute(self) -> tuple[Computed, Collection[Row]]:
        """Enqueues the next step if possible, then waits for the running one. Returns the finished step, and those of
        its rows whose results must be discarded. Its `seconds` are 0 unless it ran directly after another step."""
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
        """Has a request's results in the running step discarded, because it has ended or is preempted. Returns the
        events after which its resources are free."""
        step = self._step
        rows = [] if step is None else [row for row in step.rows if row.request is request]
        if step is None or not rows:
            return []
        step.dropped.update(rows)
        return [step.output.done]

    def _follow(self, step: _Step) -> _Step | None:
        """Enqueues the step after one that is still running. Returns None if that is not possible now."""
        at = [i for i, row in enumerate(step.rows) if row not in step.dropped]
        if not self._may_follow([step.rows[i] for i in at]):
            return None
        at = [i for i in at if _goes_on(step.rows[i].request)]
        if not at:
            return None
        rows = [Row(step.rows[i].request, 1, ahead=1) for i in at]
        return _Step(rows, self._hot.enqueue(rows, fed=at))

    def _may_follow(self, rows: list[Row]) -> bool:
        """Returns whether another step may be enqueued behind a step of these rows.

        The runner must feed tokens. No other request may be running, since it would wait. No row's logits may depend on
        a token that only the device knows yet. No strict request may have a promised time per output token, since other
        rows may have to sit out a pass for it.
        """
        if self._runner is None or not self._runner.feeds:
            return False
        requests = [row.request for row in rows]
        promised = any(request.slo_class == "strict" and request.tpot is not None for request in requests)
        free = all(request.rules is None and request.grammar is None for request in requests)
        return len(requests) == len(self._running) and not promised and free


def _goes_on(request: Request) -> bool:
    """Returns whether the request may need another token after the one being computed."""
    return request.generated + 1 < request.max_tokens
