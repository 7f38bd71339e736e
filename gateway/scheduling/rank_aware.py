"""The default policy: the node on which the request costs least, among those on which it breaks no promise.

    total = own + others
    own    = ttft * mean of 1 / tokens + step, the request's own time per token as forecast
    others = (running + waiting + reserved) * (d_prefill / expected tokens + d_decode)

the sum of what time per token becomes for the request and of what it adds to that of all who are there. Algorithm 1 of
Toppings has the second part alone, so that every idle node is free, whether it has the adapter or not, and an idle
node that breaks a promise costs infinity * 0, which is NaN (gateway.scheduling.toppings).

An adapter is at home on the node that its last request was given to. Without homes one that is called often would soon
lie on every node, and push out those that are called less: elsewhere the copy that it displaces counts, as long as the
adapter's own transfer, for the request and for everybody there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from cluster.node_table import STANDARD, NodeTable
from gateway.scheduling.cost import Scores, ScoringPolicy, Terms, attainable, terms
from gateway.scheduling.request import PlacementRequest
from gateway.scheduling.widening import Widening

RETRY_BOUNDS = (1.0, 30.0)
"""Seconds; a forecast beyond a batch's answers is worth little."""
MAX_HOMES = 32_768
"""Adapters whose homes are remembered; the one that was called least recently is forgotten."""


class RankAware(ScoringPolicy):
    """`clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_homes: int = MAX_HOMES) -> None:
        self._widening = Widening(clock)
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Node ids by digest"""
        self._max_homes = max_homes

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        self._widening.look(nodes)
        with np.errstate(all="ignore"):
            scores = self.last = self._score(nodes, candidates, request)
            best = _best(nodes, scores)
            if best is None and request.slo_class == "strict" and not scores.widened.any():
                later = attainable(nodes, scores.terms, request)
                if later.any():
                    scores.retry_after = _relief(scores.terms, later)
                    return None
            if best is None:
                best = self._least_bad(scores)
        row = int(candidates[best])
        self._note(request.digest, nodes.ids[row])
        return row

    def _score(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Scores:
        made = self._terms(nodes, candidates, request)
        plain = self._plain(made)
        # Comparisons with NaN are false: what can't be forecast never wins.
        totals = np.where((made.strain <= 1.0) & (plain < np.inf), plain, np.inf)
        home, spreading = nodes.row(self._homes.get(request.digest or "", "")), None
        at_home = candidates == (-1 if home is None else home)
        if totals[at_home].size and totals[at_home][0] < np.inf:  # it is there, and has room
            spreading = np.where(at_home, 0.0, made.transfer)
            totals = np.fmin(totals + spreading / made.answer * made.requests, np.inf)  # NaN, too, is out
        return Scores(made, totals, self._widening.widened(nodes, candidates), spreading)

    def _terms(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Terms:
        return terms(nodes, candidates, request)

    def _plain(self, made: Terms) -> np.ndarray:
        """f64[C]: the total, without what another copy displaces."""
        others = (made.requests - 1.0) * (made.prefill / made.answer + made.decode)
        plain: np.ndarray = made.ttft * made.inverse + made.step + others
        return plain

    def _least_bad(self, scores: Scores) -> int:
        """The index of the node where promises are broken by the smallest part, as far as its forecasts are
        believed."""
        made = scores.terms
        finite = [np.where(values >= 0.0, values, np.inf) for values in (self._plain(made), made.strain)]
        return int(np.lexsort((*finite, ~scores.widened))[0])

    def _note(self, digest: str | None, node_id: str | None) -> None:
        if digest is None or node_id is None:
            return
        self._homes[digest] = node_id
        self._homes.move_to_end(digest)
        if len(self._homes) > self._max_homes:
            self._homes.popitem(last=False)


def _best(nodes: NodeTable, scores: Scores) -> int | None:
    """The least total's index. Of equals the one nearest to having the adapter, then the emptier one, then the one
    with more KV memory. None: all are infinite."""
    least = scores.totals.min()
    if not least < np.inf:
        return None
    equal, made = np.flatnonzero(scores.totals == least), scores.terms
    room = nodes.kv_room[made.candidates[equal], STANDARD]
    return int(equal[np.lexsort((-room, made.requests[equal], made.tier[equal]))[0]])


def _relief(made: Terms, later: np.ndarray) -> float:
    """Seconds until one of the nodes `later` could keep the promises: its wait is shorter then, or one of its requests
    has ended."""
    late = np.maximum(made.ttft - made.ttft_limit, 0.0)
    crowded = np.where(made.step > made.tpot_limit, made.answer * made.step / np.maximum(made.requests - 1.0, 1.0), 0.0)
    until = np.maximum(late, crowded)
    low, high = RETRY_BOUNDS
    soonest = float(np.where(later & (until >= 0.0), until, np.inf).min())
    return min(max(soonest, low), high)
