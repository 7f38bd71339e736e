"""Algorithm 1 of Toppings to the letter, for comparison.

    total = (d_prefill / average response length + d_decode [+ penalty where decode(there + request) > SLO])
            * (running + waiting)

Where the adapter is does not count, every idle node costs 0, and of equals the first one wins. The penalty is finite:
with infinity an idle node that breaks the SLO would cost infinity * 0. Reserved places count as waiting requests.
"""

from __future__ import annotations

import numpy as np

from cluster.node_table import NodeTable
from gateway.scheduling.cost import Terms, terms
from gateway.scheduling.request import PlacementRequest
from gateway.scheduling.scores import Scores, ScoringPolicy

PENALTY = 1e6
"""Seconds per token."""


class Toppings(ScoringPolicy):
    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        with np.errstate(all="ignore"):
            made = terms(nodes, candidates, request)
            cost = made.prefill / (request.typical_tokens or made.answer) + made.decode
            if request.tpot is not None:
                cost = cost + np.where(_decode(nodes, made) > request.tpot, PENALTY, 0.0)
            totals = cost * made.requests
            totals = np.where(totals >= 0.0, totals, np.inf)
        self.last = Scores(made, totals)
        return int(candidates[totals.argmin()])


def _decode(nodes: NodeTable, made: Terms) -> np.ndarray:
    """f64[C]: decode(there + request), all of whom the algorithm takes for running."""
    rows = made.candidates
    there = (
        nodes.decode_base[rows]
        + made.requests * nodes.decode_per_row[rows]
        + (nodes.contexts[rows] + nodes.prompt_tokens[rows]) * nodes.decode_per_context[rows]
        + nodes.decode_ranks[rows] * nodes.decode_per_rank[rows]
    )
    step: np.ndarray = there + made.decode
    return step
