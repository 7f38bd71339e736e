"""Prometheus metrics of the gateway, in their own registry.

With several workers, each keeps its numbers in memory that all of them share (gateway.workers.metrics_memory says why),
and the worker that answers adds them up. Metrics of nodes are computed for each answer from the cluster state, and are
not added up.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cluster.messages import ColdStart
from cluster.node_book import NodeView
from gateway.workers.attainment import PROMISES, WINDOWS_S, Promise, PromiseCounts
from gateway.workers.gpu_metrics import gpu_metrics, node_gauge
from gateway.workers.metrics_memory import MetricsMemory
from gateway.workers.shared_values import SummedMetrics
from gateway.workers.vllm_metrics import vllm_metrics

MAX_LABELS = 200
"""Maximum distinct values of one label, such as the tenant or the function. Later values are replaced by `other`."""

DECISION_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


OF_NODES = (
    ("running", "Requests in a node's batch"),
    ("queued", "Requests in a node's queue"),
    ("kv_blocks", "Blocks of the KV cache"),
    ("kv_blocks_free", "Of them free"),
    ("adapter_bytes", "Adapter memory on the device"),
    ("adapter_bytes_free", "Of it free"),
    ("forecast_ratio", "Observed over forecast time of a node's last passes, median"),
    ("prefetch_useful_bytes", "Prefetched before the adapter was called"),
    ("prefetch_late_bytes", "Still to come when an adapter that was being prefetched was called"),
    ("prefetch_wasted_bytes", "Prefetched and never called"),
    ("cpu_workers", "CPU LoRA workers that help cold calls"),
)
"""Fields of NodeRecord, each with the description of its metric."""


class LabelCap:
    """Limits the distinct values of a label: names come from users, and each value takes memory permanently."""

    def __init__(self, limit: int = MAX_LABELS) -> None:
        self._limit = limit
        self._labels: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._labels:
            if len(self._labels) >= self._limit:
                return "other"
            self._labels.add(value)
        return value


class Metrics:
    def __init__(self, memory: MetricsMemory | None = None) -> None:
        """`memory` has the numbers of all workers; None if there is one worker."""
        self.registry = CollectorRegistry()
        self._memory = memory
        self._tenant = LabelCap()
        self._function = LabelCap()
        self._node = LabelCap()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry, buckets=SECONDS)
        owner = ("tenant", "function")
        self._requests = counter("garnish_requests", "Replies by route and status", ("route", "status"))
        self._invocations = counter("garnish_invocations", "Invocations by outcome", (*owner, "outcome"))
        self._tokens = counter("garnish_tokens", "Tokens by kind", (*owner, "kind"))
        self._ttft = histogram("garnish_ttft_seconds", "Receipt to first token", owner)
        self._tpot = histogram("garnish_tpot_seconds", "Between two tokens", owner)
        self._cold = counter("garnish_cold_starts", "Invocations by where the adapter was", ("tier", "plan"))
        self._exposed = counter("garnish_exposed_load_seconds", "Computation waiting for adapter bytes")
        about = "Loads of invocations' adapters: in all, and of that from the store or the disk"
        self._loads = counter("garnish_cold_load_seconds", about, ("part",))
        about = "Exposed load, planned and real, apart"
        self._forecast_error = histogram("garnish_exposed_forecast_error_seconds", about)
        about = "Layers begun before the whole adapter was there"
        self._layers = counter("garnish_cold_layers", about, ("where",))
        self._replays = counter("garnish_cold_replays", "Prompt chunks that a CPU worker failed")
        self._schedule = histogram("garnish_schedule_seconds", "Placing one request", buckets=DECISION_SECONDS)
        about = "First token, forecast at routing and real, apart"
        self._first_token_error = histogram("garnish_ttft_forecast_error_seconds", about, ("came",))
        self._retries = counter("garnish_retries", "Generations sent to another node after one failed")
        about = "Calls refused by a limit of their tenant or function"
        self._refusals = counter("garnish_limited", about, ("tenant", "limit"))
        self._opened = counter("garnish_circuits_opened", "Nodes given up for a while, by a worker each", ("node",))
        about = "Calls to which a TTFT, a TPOT or any was promised"
        self._promises = counter("garnish_slo_calls", about, ("tenant", "slo"))
        self._attained = counter("garnish_slo_attained", "Of them those that got it", ("tenant", "slo"))
        self._preemptions = counter("garnish_preemptions", "Places given up to strict requests", ("tenant",))
        about = "Invocations in progress"
        self._open = Gauge("garnish_open_invocations", about, registry=self.registry, multiprocess_mode="livesum")

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def count_invocation(self, tenant: str, function: str, outcome: str) -> None:
        self._invocations.labels(self._tenant(tenant), self._function(function), outcome).inc()

    def count_tokens(self, tenant: str, function: str, prompt: int, completion: int, cached: int) -> None:
        owner = (self._tenant(tenant), self._function(function))
        self._tokens.labels(*owner, "prompt").inc(prompt)
        self._tokens.labels(*owner, "completion").inc(completion)
        self._tokens.labels(*owner, "cached_prompt").inc(cached)

    def observe_speed(self, tenant: str, function: str, ttft: float, tpot: float | None) -> None:
        owner = (self._tenant(tenant), self._function(function))
        self._ttft.labels(*owner).observe(ttft)
        if tpot is not None:
            self._tpot.labels(*owner).observe(tpot)

    def count_cold_start(self, cold: ColdStart) -> None:
        self._cold.labels(cold.state, cold.plan).inc()
        self._exposed.inc(cold.exposed)
        self._loads.labels("load").inc(cold.load)
        self._loads.labels("fetch").inc(cold.fetch)
        self._layers.labels("cpu").inc(cold.layers_cpu)
        self._layers.labels("device").inc(cold.layers_device)
        self._replays.inc(cold.replays)
        if cold.plan not in ("none", "wait"):
            self._forecast_error.observe(abs(cold.exposed - cold.forecast))

    def count_promises(self, tenant: str, attained: dict[Promise, bool]) -> None:
        for promise, is_attained in attained.items():
            labels = (self._tenant(tenant), promise)
            self._promises.labels(*labels).inc()
            self._attained.labels(*labels).inc(is_attained)

    def count_preemptions(self, tenant: str, count: int) -> None:
        if count:
            self._preemptions.labels(self._tenant(tenant)).inc(count)

    def observe_schedule(self, seconds: float) -> None:
        self._schedule.observe(seconds)

    def observe_forecast(self, forecast: float, real: float) -> None:
        """Records the error, in seconds, of a forecast of the time from a request's routing to its first token."""
        direction = "later" if real > forecast else "sooner"
        self._first_token_error.labels(direction).observe(abs(real - forecast))

    def count_retry(self) -> None:
        self._retries.inc()

    def count_refusal(self, tenant: str, why: str) -> None:
        self._refusals.labels(self._tenant(tenant), why).inc()

    def count_opened_circuit(self, node_id: str) -> None:
        self._opened.labels(self._node(node_id)).inc()

    def change_open(self, by: int) -> None:
        self._open.inc(by)

    def render(
        self,
        nodes: Iterable[NodeView],
        attained: Mapping[str, list[PromiseCounts]] | None = None,
        stale: float | None = None,
    ) -> bytes:
        """Returns the Prometheus text of all workers, of the nodes, and of SLO attainment by tenant and window.

        `stale`: seconds for which the cluster state has been outdated; None if it is current.
        """
        counted, gauges, views = self.registry, CollectorRegistry(), list(nodes)
        if self._memory is not None:
            counted = CollectorRegistry()
            counted.register(SummedMetrics(self._memory))
        of_nodes = [*_of_nodes(views, stale or 0.0), *_residency(views), *gpu_metrics(views), *vllm_metrics(views)]
        gauges.register(_Gauges([*of_nodes, self._of_promises(attained or {})]))
        return generate_latest(counted) + generate_latest(gauges)

    def _of_promises(self, attained: Mapping[str, list[PromiseCounts]]) -> Metric:
        sums: dict[tuple[str, int], PromiseCounts] = {}
        for tenant, windows in attained.items():
            for seconds, attainment in zip(WINDOWS_S, windows, strict=True):
                sums.setdefault((self._tenant(tenant), seconds), PromiseCounts()).add(attainment)
        about = "Share of calls that got what was promised"
        family = GaugeMetricFamily("garnish_slo_attainment", about, labels=("tenant", "slo", "window"))
        for (tenant, seconds), attainment in sums.items():
            for promise in PROMISES:
                share = attainment.share(promise)
                if share is not None:
                    family.add_metric((tenant, promise, f"{seconds}s"), share)
        return family


class _Gauges(Collector):
    """Gauges that are computed for one answer."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def _of_nodes(views: list[NodeView], stale: float) -> Iterator[Metric]:
    about = "Since when the worker that answers has been without Redis"
    yield GaugeMetricFamily("garnish_cluster_stale_seconds", about, value=stale)
    states = GaugeMetricFamily("garnish_nodes", "Nodes by state", labels=("state",))
    for state, count in sorted(Tally(view.record.state for view in views).items()):
        states.add_metric((state,), count)
    yield states
    for field, about in OF_NODES:
        yield node_gauge(field, about, [(view.record.id, getattr(view.record, field)) for view in views])
    yield _of_cpu_workers(views)


def _of_cpu_workers(views: list[NodeView]) -> Metric:
    about = "Milliseconds by which a node decided on its CPU LoRA workers"
    family = GaugeMetricFamily("garnish_node_cpu_workers_ms", about, labels=("node", "figure"))
    for view in views:
        for figure, value in view.record.cpu_workers_ms.items():
            family.add_metric((view.record.id, figure), value)
    return family


def _residency(views: list[NodeView]) -> Iterator[Metric]:
    adapters = GaugeMetricFamily("garnish_resident_adapters", "Adapters by tier", labels=("node", "tier"))
    size = GaugeMetricFamily("garnish_resident_bytes", "Bytes of adapters by tier", labels=("node", "tier"))
    for view in views:
        count, total = Tally[str](), Tally[str]()
        for resident in view.residents.values():
            count[resident.tier] += 1
            total[resident.tier] += resident.bytes
        for tier in sorted(count):
            adapters.add_metric((view.record.id, tier), count[tier])
            size.add_metric((view.record.id, tier), total[tier])
    yield from (adapters, size)
