"""Exact implementation of Algorithm 1 of the Toppings paper, for comparison.

    total = (d_prefill / average response length + d_decode [+ penalty where decode(there + request) > SLO])
            * (running + waiting)

The adapter's location is ignored, every idle node costs 0, and the first of several equal nodes wins. The penalty is
finite, because with infinity an idle node that violates the SLO would cost infinity * 0. Reserved places count as
waiting requests.
"""

from __future__ import annotations

import numpy as np

from cluster.node_table import NodeTable
from gateway.scheduling.cost import Scores, ScoringPolicy, terms
from gateway.scheduling.request import RoutingRequest

PENALTY = 1e6
"""Penalty for a violated SLO, in seconds per token."""


class Toppings(ScoringPolicy):
    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:
        with np.errstate(all="ignore"):
            costs = terms(nodes, candidates, request)
            cost = costs.prefill / (request.typical_tokens or costs.answer) + costs.decode
            tpot = request.demand.tpot
            if tpot is not None:  # decode(there + request): the algorithm assumes that all of them run
                broken = nodes.decode_there[candidates] + costs.decode > tpot
                cost = cost + np.where(broken, PENALTY, 0.0)
            totals = cost * (costs.requests - 1.0)
            totals = np.where(totals >= 0.0, totals, np.inf)
        self.last = Scores(costs, totals, np.zeros(totals.size, np.bool_))
        return int(candidates[totals.argmin()])
