"""Records how each generation ended: for metrics, SLO attainment, loads of pools, and the function's last hour."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from cluster.messages import Done, GenerateRequest
from gateway.calls.trace_log import log_call
from gateway.workers.attainment import Attainment, judge
from gateway.workers.last_hour import Counts, LastHour
from gateway.workers.metrics import Metrics
from gateway.workers.pool_loads import PoolLoads, QueueSample

JUDGED = frozenset({"ok", "overloaded", "timeout", "unavailable", "node_failed", "internal"})
"""Outcomes that count for SLO attainment, because the service and not the caller is responsible for them."""


@dataclass(slots=True)
class Times:
    """Times of one generation in monotonic seconds (None until they occur), and durations in seconds."""

    received: float
    sent_at: float | None = None
    """Time at which the request was sent to the current node. Once a token has arrived, it stays the time of sending to
    the first token's node."""
    started_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    done_at: float | None = None
    hold_wait: float = 0.0
    schedule: float = 0.0
    """Seconds that routing took, over all attempts."""
    forecast: float | None = None
    """The scheduler's forecast of the time from `sent_at` to the first token."""
    tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Returns the seconds from receipt to the first token; None before the first token."""
        return None if self.first_at is None else self.first_at - self.received

    @property
    def tpot(self) -> float | None:
        """Returns the mean seconds between two tokens; None before the second token."""
        if self.first_at is None or self.last_at is None or self.tokens < 2:
            return None
        return (self.last_at - self.first_at) / (self.tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Records the generations of one gateway worker."""

    metrics: Metrics
    last_hour: LastHour = field(default_factory=partial(LastHour, time.monotonic))
    attainment: Attainment = field(default_factory=partial(Attainment, time.monotonic))
    loads: PoolLoads = field(default_factory=partial(PoolLoads, time.monotonic))

    def record_end(
        self, request: GenerateRequest, function: str, outcome: str, done: Done | None, times: Times, stay: QueueSample
    ) -> None:
        """Records a generation that has ended. `outcome`: `cancelled`, or the type of the error that ended it."""
        tenant, metrics, ttft, tpot = request.tenant, self.metrics, times.ttft, times.tpot
        ended = "ok" if done is not None and outcome == "cancelled" else outcome
        metrics.count_invocation(tenant, function, ended)
        if ended in JUDGED:
            attained = judge((request.ttft, request.tpot), (ttft, tpot), answered=ended == "ok")
            self.attainment.record(tenant, attained)
            if attained:
                stay.judge(attained["all"])
            metrics.count_promises(tenant, attained)
        counts = Counts(invocations=1, failures=ended not in ("ok", "cancelled"))
        if done is not None:
            counts.prompt_tokens, counts.completion_tokens = done.prompt_tokens, done.completion_tokens
            metrics.count_tokens(tenant, function, done.prompt_tokens, done.completion_tokens, done.cached_tokens)
            metrics.count_cold_start(done.timing.cold_start)
            log_call(request, done, times.received)
            metrics.count_preemptions(tenant, done.timing.preemptions)
        if times.forecast is not None and times.sent_at is not None and times.first_at is not None:
            metrics.observe_forecast(times.forecast, times.first_at - times.sent_at)
        if ttft is not None:
            counts.first_tokens, counts.ttft_seconds = 1, ttft
            metrics.observe_speed(tenant, function, ttft, tpot)
        self.last_hour.record(tenant, function, counts)
