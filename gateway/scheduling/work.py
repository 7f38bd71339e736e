"""How much of a node a request takes up: its share of a node that is full, by the node's own cost model."""

from __future__ import annotations

import math

from cluster.node_table import NodeTable
from gateway.scheduling.request import PlacementRequest

RATIO = (0.1, 10.0)
"""Bounds of what a node's observed / forecast is believed to be."""


def work(nodes: NodeTable, row: int, request: PlacementRequest) -> float | None:
    """Seconds of the node's time; None where its costs were never measured.

    The prompt's prefill, and of each decode step the share that one row has when as many run as rows and KV memory
    allow: what n such requests take up is n times that, however few happen to run now.
    """
    if not nodes.modelled[row]:
        return None
    tokens, answer, rank = float(request.prompt_tokens), request.answer_tokens, float(request.rank)
    prefill = (
        float(nodes.prefill_base[row])
        + tokens * float(nodes.prefill_per_token[row])
        + tokens * tokens * float(nodes.prefill_per_token2[row])
        + tokens * rank * float(nodes.prefill_per_token_rank[row])
    )
    together = rows_together(nodes, row, tokens + answer)
    step = (
        float(nodes.decode_base[row]) / together
        + float(nodes.decode_per_row[row]) * max(0.0, 1.0 - float(nodes.decode_flat_rows[row]) / together)
        + (tokens + answer / 2) * float(nodes.decode_per_context[row])
        + rank * float(nodes.decode_per_rank[row])
    )
    ratio = nodes.record(row).forecast_ratio
    if ratio is None or not math.isfinite(ratio):
        ratio = 1.0
    return (prefill + answer * step) * min(max(ratio, RATIO[0]), RATIO[1])


def rows_together(nodes: NodeTable, row: int, tokens: float) -> float:
    """Requests of so many tokens that the node computes at once: at least 1."""
    most = [float(nodes.capacity[row])]
    if nodes.kv_tokens[row]:
        most.append(float(nodes.kv_tokens[row]) / tokens)
    together = min(most)
    return max(1.0, together) if math.isfinite(together) else 1.0
