"""Prometheus metrics of forecasts and of orders to nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.residency.messages import Cause

Outcome = Literal["taken", "failed"]


class ResidencyMetrics:
    """Residency metrics of one process, one per `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._error = Gauge(
            "garnish_forecast_error",
            "How wrong forecasts of calls were lately, by the leader",
            ("score",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._wanted_adapters = Gauge(
            "garnish_wanted_adapters",
            "Adapters that nodes are to have ready, summed over nodes, by the leader",
            ("cause",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._left_out = Gauge(
            "garnish_left_out_adapters",
            "Adapters that were ordered, scheduled or provisioned and that no node is asked to have, by the leader",
            ("cause",),
            registry=registry,
            multiprocess_mode="livemostrecent",
        )
        self._orders = Counter(
            "garnish_residency_orders", "Orders to nodes of what to have ready", ("outcome",), registry=registry
        )

    def set_error(self, scores: Mapping[str, float]) -> None:
        for score, value in scores.items():
            self._error.labels(score).set(value)

    def set_wanted(self, counts: Mapping[str, int]) -> None:
        for cause in get_args(Cause):
            self._wanted_adapters.labels(cause).set(counts.get(cause, 0))

    def set_left_out(self, counts: Mapping[str, int]) -> None:
        for cause in get_args(Cause):
            self._left_out.labels(cause).set(counts.get(cause, 0))

    def count_order(self, outcome: Outcome) -> None:
        self._orders.labels(outcome).inc()
