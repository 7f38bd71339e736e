"""Values of Prometheus metrics in the memory that gateway workers share, and the collector that adds them up."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import msgspec
from prometheus_client import Metric, values
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.workers.metrics_memory import MetricsMemory, Slot

MODES = ("", "livesum", "livemostrecent")
"""Rules by which gauges of several workers become one; empty for counters and histograms, which are added up."""

Labels = tuple[tuple[str, str], ...]
log = logging.getLogger("gateway")


class _Key(NamedTuple):
    """Fields of an entry's key, in the order of its JSON list."""

    type: str
    mode: str
    metric: str
    sample: str
    labels: Sequence[tuple[str, str]]
    help: str


def use_slot(slot: Slot) -> None:
    """Makes this process keep the values of all metrics that it creates from now on in `slot`. Continues the counters
    that an earlier worker left there."""
    slot.clear_gauges()
    values.ValueClass = type("SlotValue", (_Value,), {"worker": _WorkerValues(slot)})


class _WorkerValues:
    """Metric values of one worker, in its slot of the shared memory."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self.lock = slot, Lock()
        self._places = dict(slot.entries())
        self._is_reported = False

    def place(self, key: bytes) -> int | None:
        """Returns the place of a key's numbers in the slot, and creates it if missing.

        Returns None if the slot is full, and logs the first such case.
        """
        with self.lock:
            if key not in self._places:
                place = self.slot.add(key)
                if place is None:
                    self._report_full()
                    return None
                self._places[key] = place
            return self._places[key]

    def _report_full(self) -> None:
        if not self._is_reported:
            log.error("this worker's memory for metrics is full: metrics with further names or labels are not shown")
        self._is_reported = True


class _Value:
    """Value in the worker's slot, with the methods that prometheus_client calls. Once the slot is full, further values
    are in this process alone and are not shown."""

    _multiprocess = True
    worker: ClassVar[_WorkerValues]

    def __init__(
        self,
        typ: str,
        metric_name: str,
        name: str,
        labelnames: Sequence[str],
        labelvalues: Sequence[str],
        help_text: str,
        multiprocess_mode: str = "",
        **_: Any,
    ) -> None:
        if multiprocess_mode not in MODES:
            raise ValueError(f"{metric_name}: mode {multiprocess_mode!r} is not one of {MODES}")
        labels = list(zip(labelnames, labelvalues, strict=True))
        key = msgspec.json.encode(_Key(typ, multiprocess_mode, metric_name, name, labels, help_text))
        self._place, self._value = self.worker.place(key), 0.0

    def inc(self, amount: float) -> None:
        with self.worker.lock:
            self._set(self._get() + amount, 0.0)

    def set(self, value: float, timestamp: float | None = None) -> None:
        with self.worker.lock:
            self._set(value, timestamp or 0.0)

    def get(self) -> float:
        with self.worker.lock:
            return self._get()

    def set_exemplar(self, exemplar: object) -> None:
        """Drops the exemplar: it can't be added up."""

    def get_exemplar(self) -> None:
        return None

    def _get(self) -> float:
        return self._value if self._place is None else self.worker.slot.read(self._place)[0]

    def _set(self, value: float, at: float) -> None:
        if self._place is None:
            self._value = value
        else:
            self.worker.slot.write(self._place, value, at)


class SummedMetrics(Collector):
    """Metrics of all workers, those that have ended included."""

    def __init__(self, memory: MetricsMemory) -> None:
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        sums: dict[str, _Sum] = {}
        for slot in self._memory.slots():
            for raw, place in slot.entries():
                key = msgspec.json.decode(raw, type=_Key)
                summed = sums.get(key.metric)
                if summed is None:
                    summed = sums[key.metric] = _Sum(Metric(key.metric, key.help, key.type))
                summed.add(key, *slot.read(place))
        return [summed.metric() for summed in sums.values()]


class _Sum:
    """Sum of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._values: dict[tuple[str, Labels], float] = defaultdict(float)
        self._times: dict[tuple[str, Labels], float] = defaultdict(float)
        self._buckets: dict[Labels, dict[float, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, key: _Key, value: float, at: float) -> None:
        labels = tuple((name, text) for name, text in key.labels)
        sample = key.sample, labels
        if key.mode == "livemostrecent":
            if at > self._times[sample]:
                self._times[sample], self._values[sample] = at, value
        elif key.sample.endswith("_bucket") and labels[-1][0] == "le":
            self._buckets[labels[:-1]][float(labels[-1][1])] += value
        else:
            self._values[sample] += value

    def metric(self) -> Metric:
        for labels, buckets in self._buckets.items():
            total = 0.0
            for bound, count in sorted(buckets.items()):
                total += count
                text = floatToGoString(bound)  # type: ignore[no-untyped-call]
                self._values[f"{self._metric.name}_bucket", (*labels, ("le", text))] = total
            self._values[f"{self._metric.name}_count", labels] = total
        for (name, labels), value in self._values.items():
            self._metric.add_sample(name, dict(labels), value)
        return self._metric
