"""Prometheus metrics of the nodes' GPUs, as the nodes report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from cluster.gpu import THROTTLE_REASONS
from cluster.node_book import NodeView

OF_FACTS = (
    ("memory", "memory_bytes", "Memory of a node's GPU"),
    ("ecc_corrected", "ecc_corrected", "Corrected ECC errors since the GPU's last reset"),
    ("ecc_uncorrectable", "ecc_uncorrectable", "Uncorrectable ECC errors since the GPU's last reset"),
    ("xids", "xids", "Xid errors since the node's start"),
    ("xid", "last_xid", "Number of the last Xid error; 0: none"),
    ("pcie_width_now", "pcie_lanes", "PCIe lanes in use"),
    ("link", "link_bytes_per_second", "What the PCIe link to the GPU should carry"),
)
"""Fields of GpuFacts, each with the suffix of its metric's name and the metric's description."""
OF_LOAD = (
    ("memory_used", "memory_used_bytes", "Memory in use on a node's GPU"),
    ("utilisation", "utilisation_percent", "Time in which a kernel ran"),
    ("power", "power_watts", "Power that the GPU draws"),
    ("temperature", "temperature_celsius", "Temperature of the GPU"),
)
"""Fields of GpuLoad, each with the suffix of its metric's name and the metric's description."""


OF_TROUBLE = (
    ("fault", "failed", "1: the GPU can't be used any more"),
    ("slow_link", "link_slow", "1: the link to the GPU is slower than it should be"),
    ("problem", "unwatched", "1: NVML fails or hangs"),
)
"""Text fields of GpuFacts that report a problem. The metric of such a field is 1 if the text is not empty."""


def gpu_metrics(views: Sequence[NodeView]) -> Iterator[Metric]:
    """Yields the metrics of the nodes' GPUs; none if no node reports a GPU."""
    facts = [(view.record.id, view.record.gpu) for view in views if view.record.gpu is not None]
    loads = [(view.record.id, view.record.gpu_load) for view in views if view.record.gpu_load is not None]
    for field, name, about in OF_FACTS if facts else ():
        yield node_gauge(f"gpu_{name}", about, [(node, getattr(gpu, field)) for node, gpu in facts])
    for field, name, about in OF_TROUBLE if facts else ():
        yield node_gauge(f"gpu_{name}", about, [(node, bool(getattr(gpu, field))) for node, gpu in facts])
    for field, name, about in OF_LOAD if loads else ():
        yield node_gauge(f"gpu_{name}", about, [(node, getattr(load, field)) for node, load in loads])
    if loads:
        yield _throttled([(node, load.throttled) for node, load in loads if load.throttled is not None])


def node_gauge(name: str, about: str, values: Sequence[tuple[str, float | None]]) -> Metric:
    """Returns a gauge with one value per node, without nodes whose value is None."""
    family = GaugeMetricFamily(f"garnish_node_{name}", about, labels=("node",))
    for node, value in values:
        if value is not None:
            family.add_metric((node,), value)
    return family


def _throttled(values: Sequence[tuple[str, int]]) -> Metric:
    about = "1: the reason holds the GPU's clocks back"
    family = GaugeMetricFamily("garnish_node_gpu_throttled", about, labels=("node", "reason"))
    for node, bits in values:
        for bit, reason in THROTTLE_REASONS.items():
            family.add_metric((node, reason), bool(bits & bit))
    return family
