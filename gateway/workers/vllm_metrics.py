"""Prometheus metrics of vLLM on the nodes that drive it, as the nodes report them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import Metric

from cluster.node_book import NodeView
from gateway.workers.gpu_metrics import node_gauge

OF_LOAD = (
    ("running", "Requests in vLLM's batch"),
    ("waiting", "Requests that vLLM has and does not compute"),
    ("kv_usage", "Share of vLLM's KV blocks in use"),
    ("preemptions", "Requests that vLLM preempted since its start"),
)
"""Fields of VllmLoad, each with the description of its metric."""


def vllm_metrics(views: Sequence[NodeView]) -> Iterator[Metric]:
    """Yields the metrics of vLLM; none if no node drives it."""
    loads = [(view.record.id, view.record.vllm) for view in views if view.record.vllm is not None]
    for field, about in OF_LOAD if loads else ():
        yield node_gauge(f"vllm_{field}", about, [(node, getattr(load, field)) for node, load in loads])
