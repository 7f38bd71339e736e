"""Prometheus metrics of asynchronous calls. No label value comes from a user."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.events.records import ENDED, EventRecord


class EventMetrics:
    """Event metrics of one process, one per `registry`; safe to use from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._accepted = Counter("garnish_events_accepted", "Asynchronous calls accepted", registry=registry)
        self._attempts = Counter(
            "garnish_event_attempts", "Executions of them by outcome", ("outcome",), registry=registry
        )
        self._ended = Counter("garnish_events_ended", "Their ends by state", ("state",), registry=registry)
        self._redriven = Counter("garnish_events_redriven", "Dead letters queued again", registry=registry)
        self._deliveries = Counter(
            "garnish_event_deliveries", "Ends of telling destinations by outcome", ("outcome",), registry=registry
        )
        self._there = Gauge(
            "garnish_events",
            "Asynchronous calls that there are by index, of all tenants, by the leader",
            ("index",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )

    def record_change(self, before: EventRecord | None, now: EventRecord) -> None:
        """Counts a change that was stored. `before` is None for a new event."""
        if before is None:
            self._accepted.inc()
            return
        if before.state == "running":
            self._attempts.labels("retried" if now.state == "queued" else now.state).inc()
        if before.state not in ENDED and now.state in ENDED:
            self._ended.labels(now.state).inc()
        if before.state in ENDED and now.state == "queued":
            self._redriven.inc()
        if before.delivery is not None and now.delivery is not None and before.delivery.state != now.delivery.state:
            self._deliveries.labels(now.delivery.state).inc()

    def show_there(self, index: str, count: int) -> None:
        self._there.labels(index).set(count)
