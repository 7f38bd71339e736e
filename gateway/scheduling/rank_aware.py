"""The default policy: the request goes to the node with the lowest total cost that violates no SLO.

    total  = own + others + copy
    own    = ttft * mean of 1 / tokens + step, the request's own time per token as forecast
    others = (running + waiting + reserved) * (d_prefill / expected tokens + d_decode)
    copy   = (running + waiting + reserved + 1) * transfer / expected tokens, where the adapter is not on the device

The total is the request's own time per token plus what it adds to the time per token of the node's other requests.
Algorithm 1 of Toppings has `others` alone (gateway.scheduling.toppings). So every idle node costs 0, with or without
the adapter, and an idle node that violates an SLO costs infinity * 0, which is NaN. Without `copy`, an adapter that is
called often would soon be on every node and evict less used ones, which would have to be loaded again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

import numpy as np

from cluster.model_check import is_off
from cluster.node_table import STANDARD, NodeTable
from gateway.scheduling.cost import Scores, ScoringPolicy, Terms, attainable, terms
from gateway.scheduling.request import RoutingRequest

RETRY_BOUNDS = (1.0, 30.0)
"""Minimum and maximum of Retry-After, in seconds. A forecast further ahead than a batch's answers is unreliable."""
PATIENCE_S = 60.0
"""Seconds for which a node's model must be inaccurate before the node is widened, so that its forecasts refuse no
request."""
CHECK_EVERY_S = 1.0

log = logging.getLogger("gateway")


class RankAware(ScoringPolicy):
    """The default routing policy. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._widening = Widening(clock)

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:
        self._widening.update(nodes)
        with np.errstate(all="ignore"):
            scores = self.last = self._score(nodes, candidates, request)
            best = _best(nodes, scores)
            if best is None and request.demand.slo_class == "strict" and not scores.widened.any():
                later = attainable(nodes, scores.terms, request)
                if later.any():
                    scores.retry_after = _retry_after(scores.terms, later)
                    return None
            if best is None:
                best = self._smallest_breach(scores)
        return int(candidates[best])

    def _score(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> Scores:
        costs = self._terms(nodes, candidates, request)
        plain = self._total_cost(costs)
        # Comparisons with NaN are false: what can't be forecast never wins.
        totals = np.where((costs.strain <= 1.0) & (plain < np.inf), plain, np.inf)
        return Scores(costs, totals, self._widening.widened(nodes, candidates))

    def _terms(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> Terms:
        return terms(nodes, candidates, request)

    def _total_cost(self, costs: Terms) -> np.ndarray:
        """Returns f64[C]: the total cost of each candidate in seconds per token, regardless of SLOs."""
        imposed = (costs.requests - 1.0) * (costs.prefill / costs.answer + costs.decode)
        copy = costs.requests * costs.spreading / costs.answer
        plain: np.ndarray = costs.ttft * costs.inverse + costs.step + imposed + copy
        return plain

    def _smallest_breach(self, scores: Scores) -> int:
        """Returns the index of the candidate whose SLO violation is the smallest.

        Widened nodes come first, because their forecasts are not trusted.
        """
        costs = scores.terms
        finite = [np.where(values >= 0.0, values, np.inf) for values in (self._total_cost(costs), costs.strain)]
        return int(np.lexsort((*finite, ~scores.widened))[0])


def _best(nodes: NodeTable, scores: Scores) -> int | None:
    """Returns the index of the candidate with the lowest total; None if all totals are infinite.

    Ties go to the node with the adapter in the fastest tier, then to the one with the fewest requests, then to the one
    with the most free KV memory.
    """
    minimum = scores.totals.min()
    if not minimum < np.inf:
        return None
    equal, costs = np.flatnonzero(scores.totals == minimum), scores.terms
    room = nodes.kv_room[costs.candidates[equal], STANDARD]
    return int(equal[np.lexsort((-room, costs.requests[equal], costs.tier[equal]))[0]])


def _retry_after(costs: Terms, later: np.ndarray) -> float:
    """Returns the seconds until a node could meet the SLOs, clipped to RETRY_BOUNDS.

    `later`: bool[C], the nodes that would meet them when idle. Such a node can accept the request after a shorter wait,
    or when one of its requests has ended.
    """
    late = np.maximum(costs.ttft - costs.ttft_limit, 0.0)
    crowded = np.where(
        costs.step > costs.tpot_limit, costs.answer * costs.step / np.maximum(costs.requests - 1.0, 1.0), 0.0
    )
    until = np.maximum(late, crowded)
    low, high = RETRY_BOUNDS
    soonest = float(np.where(later & (until >= 0.0), until, np.inf).min())
    return min(max(soonest, low), high)


class Widening:
    """Widened nodes: their performance model has been inaccurate for PATIENCE_S seconds. Their forecasts refuse no
    request until the model is accurate again.

    Each node reports the ratio of its latest passes to what its model forecasts (`forecast_ratio`). A request that no
    node could serve in time is refused at once on the strength of forecasts alone. With wrong forecasts it would be
    refused for nothing.

    `clock`: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked = -math.inf
        self._inaccurate_since: dict[str, float] = {}
        self._widened: frozenset[str] = frozenset()

    def update(self, nodes: NodeTable) -> None:
        """Records which nodes' models have been inaccurate for PATIENCE_S seconds.

        Must be called before each choice; it checks at most once per CHECK_EVERY_S seconds.
        """
        now = self._clock()
        if now - self._looked < CHECK_EVERY_S:
            return
        self._looked = now
        off = [nodes.record(row).id for row in nodes.rows() if is_off(nodes.record(row).forecast_ratio)]
        self._inaccurate_since = {node: self._inaccurate_since.get(node, now) for node in off}
        widened = frozenset(node for node, since in self._inaccurate_since.items() if now - since >= PATIENCE_S)
        for node in widened - self._widened:
            log.warning(
                "forecasts of node %s are inaccurate: they refuse no requests until they are accurate again", node
            )
        for node in self._widened - widened:
            log.info("forecasts of node %s are accurate again: they may refuse requests", node)
        self._widened = widened

    def widened(self, nodes: NodeTable, candidates: np.ndarray) -> np.ndarray:
        """Returns bool[C]: whether each of the C candidates is widened."""
        if not self._widened:
            return np.zeros(candidates.size, np.bool_)
        return np.array([nodes.ids[row] in self._widened for row in candidates.tolist()])
