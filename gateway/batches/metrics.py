"""Prometheus metrics of batches."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.batches.messages import Status

Outcome = Literal["completed", "failed", "put_back"]


class BatchMetrics:
    """Batch metrics of one process, one per `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = Gauge(
            "garnish_batches_running", "Batches that run", registry=registry, multiprocess_mode="livesum"
        )
        self.open = Gauge(
            "garnish_batches_open",
            "Batches that have not ended, of all tenants, as a gateway last saw it",
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._ended = Counter("garnish_batches_ended", "Ends of batches by status", ("status",), registry=registry)
        self._calls = Counter("garnish_batch_calls", "Calls of batches by outcome", ("outcome",), registry=registry)

    def count_end(self, status: Status) -> None:
        self._ended.labels(status).inc()

    def count_call(self, outcome: Outcome) -> None:
        self._calls.labels(outcome).inc()
