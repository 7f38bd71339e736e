"""Prometheus metrics of leader election and of the leader's jobs."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

Beat = Literal["led", "followed", "failed"]


class LeaderMetrics:
    """Leader metrics of one process, one per `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._leads = Gauge(
            "garnish_leader", "1 for the worker that leads", ("worker",), registry=registry, multiprocess_mode="livesum"
        )
        self._beats = Counter(
            "garnish_leader_beats", "Heartbeats of workers by outcome", ("outcome",), registry=registry
        )
        self._work = Counter("garnish_leader_work", "What the leader's jobs did", ("job",), registry=registry)
        self._failures = Counter("garnish_leader_failures", "Turns of jobs that failed", ("job",), registry=registry)

    def set_leads(self, worker: str, leads: bool) -> None:
        self._leads.labels(worker).set(leads)

    def count_beat(self, outcome: Beat) -> None:
        self._beats.labels(outcome).inc()

    def count_turn(self, job: str, work: int, failed: bool) -> None:
        self._work.labels(job).inc(work)
        self._failures.labels(job).inc(failed)
