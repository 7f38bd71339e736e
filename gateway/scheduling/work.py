"""Work of a request: the share of a full node's time that it takes, by the node's own cost model."""

from __future__ import annotations

import math

from cluster.node_load import NodeLoad
from cluster.node_table import NodeTable
from gateway.scheduling.request import RoutingRequest

RATIO = (0.1, 10.0)
"""Minimum and maximum to which a node's ratio of observed to forecast time is clipped."""


def work(nodes: NodeTable, row: int, request: RoutingRequest) -> float | None:
    """Returns the node time that a request takes, in seconds; None if the node has no measured model.

    It is the prompt's prefill, plus one row's share of each decode step in a full batch. The batch is as large as rows
    and KV memory allow. So n equal requests take n times this, however many run now.
    """
    if not nodes.modelled[row]:
        return None
    tokens, rank = request.demand.prompt_tokens, request.demand.rank
    answer, model = request.answer_tokens, nodes.model(row)
    prefill = model.prefill.seconds(tokens, tokens * tokens, tokens * rank)
    together = rows_together(nodes.load(row), tokens + answer)
    contexts, ranks = together * (tokens + answer / 2), together * rank
    step = model.decode.seconds(together, contexts, ranks) / together
    ratio = nodes.record(row).forecast_ratio
    if ratio is None or not math.isfinite(ratio):
        ratio = 1.0
    return (prefill + answer * step) * min(max(ratio, RATIO[0]), RATIO[1])


def rows_together(load: NodeLoad, tokens: float) -> float:
    """Returns how many requests of `tokens` tokens each the node can compute at once, at least 1."""
    limits = [float(load.max_rows)] if load.max_rows else []
    if load.kv_tokens:
        limits.append(load.kv_tokens / tokens)
    return max(1.0, min(limits, default=1.0))
