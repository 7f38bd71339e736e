"""The default policy: the node on which the request costs least, among those on which it breaks no promise.

    total = own + OTHERS * (running + waiting + reserved) * (d_prefill / expected tokens + d_decode)
    own   = ttft * mean of 1 / tokens + step, the request's own time per token as forecast

the sum of what time per token becomes for the request and of what it adds to that of all who are there. Algorithm 1 of
Toppings has d_prefill and d_decode alone, so that every idle node is free, whether it has the adapter or not, and an
idle node that breaks a promise costs infinity * 0, which is NaN (gateway.scheduling.toppings).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cluster.node_table import DEVICE, NodeTable
from gateway.scheduling.cost import Terms, attainable, terms
from gateway.scheduling.request import PlacementRequest
from gateway.scheduling.scores import Scores, ScoringPolicy
from gateway.scheduling.spreading import Spreading

OTHERS = 0.6
"""Of what a request adds to a step, what those who are there and those who come meanwhile have of it: it runs beside a
part of each one's answer. Where answers are distributed exponentially 1 - ln 2 of each answer that runs, and as much of
those that come."""
EQUAL = 1e-9
"""Totals that differ by less than this part are the same but for rounding."""
RETRY_BOUNDS = (1.0, 30.0)
"""Seconds; a forecast beyond a batch's answers is worth little."""


class RankAware(ScoringPolicy):
    """`gateways`: processes that place requests, of which this is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, gateways: Callable[[], int] = lambda: 1) -> None:
        self._spreading = Spreading(clock, gateways=gateways)

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        with np.errstate(all="ignore"):
            scores = self.last = self._score(nodes, candidates, request)
            best = _best(nodes, scores)
            if best is None:
                if request.slo_class == "strict" and (later := attainable(nodes, scores.terms, request)).any():
                    scores.retry_after = _relief(scores.terms, later)
                    return None
                best = _least_bad(scores)
        row = int(candidates[best])
        self._note(nodes, row, best, request, scores.terms)
        return row

    def _score(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Scores:
        made = terms(nodes, candidates, request)
        plain = _plain(made)
        # Comparisons with NaN are false: what can't be forecast never wins.
        totals = np.where((made.strain <= 1.0) & (plain < np.inf), plain, np.inf)
        spreading = self._charge(nodes, made, request, totals)
        if spreading is not None:
            totals = np.fmin(totals + spreading / made.answer * made.requests, np.inf)  # NaN, too, is out
        return Scores(made, totals, spreading)

    def _charge(
        self, nodes: NodeTable, made: Terms, request: PlacementRequest, totals: np.ndarray
    ) -> np.ndarray | None:
        """What one more copy of the adapter displaces, and must be loaded again: as long as its own transfer."""
        if request.digest is None:
            return None
        inside = self._at_home(nodes, made.candidates, request.digest)
        if not (inside.size and totals[inside].min() < np.inf):  # nobody at home, or no room there
            return None
        charge = made.transfer.copy()
        charge[inside] = 0.0
        return charge

    def _at_home(self, nodes: NodeTable, candidates: np.ndarray, digest: str) -> np.ndarray:
        """i64: indices of candidates."""
        found = []
        for node_id in list(self._spreading.homes(digest)):
            row = nodes.row(node_id)
            if row is None:
                self._spreading.forget(digest, node_id)
            else:
                found.append(row)
        rows = np.array(found, np.int64)
        if not found or candidates.size == nodes.height:  # candidates are all rows
            return rows
        indices = np.minimum(candidates.searchsorted(rows), candidates.size - 1)
        inside: np.ndarray = indices[candidates[indices] == rows]
        return inside

    def _note(self, nodes: NodeTable, row: int, best: int, request: PlacementRequest, made: Terms) -> None:
        node_id = nodes.ids[row]
        if request.digest is None or node_id is None:
            return
        seconds = float(made.prefill[best] + made.exposed[best] + made.answer * made.step[best])
        self._spreading.note(request.digest, node_id, request.id, seconds, int(nodes.max_rows[row]))


def _plain(made: Terms) -> np.ndarray:
    """f64[C]: the total, without what another copy displaces."""
    # A prompt whose adapter is still to come misses the pass that begins next.
    first = made.ttft + (made.tier != DEVICE) * made.step
    others = (made.requests - 1.0) * (made.prefill / made.answer + made.decode)
    plain: np.ndarray = first * made.inverse + made.step + OTHERS * others
    return plain


def _best(nodes: NodeTable, scores: Scores) -> int | None:
    """The least total's index. Of equals the one nearest to having the adapter, then the emptier one, then the one
    with more KV memory. None: all are infinite."""
    totals = scores.totals
    best = int(totals.argmin())
    least = totals[best]
    if not least < np.inf:
        return None
    equal = np.flatnonzero(totals <= least * (1.0 + EQUAL))
    if equal.size == 1:
        return best
    rows = scores.terms.candidates[equal]
    order = np.lexsort((-nodes.kv_tokens_free[rows], scores.terms.requests[equal], scores.terms.tier[equal]))
    return int(equal[order[0]])


def _least_bad(scores: Scores) -> int:
    """The index of the node where promises are broken by the smallest part."""
    made = scores.terms
    finite = [np.where(values >= 0.0, values, np.inf) for values in (_plain(made), made.strain)]
    return int(np.lexsort(finite)[0])


def _relief(made: Terms, later: np.ndarray) -> float:
    """Seconds until one of the nodes `later` could keep the promises: its wait is shorter then, or one of its requests
    has ended."""
    late = np.maximum(made.ttft - made.ttft_limit, 0.0)
    crowded = np.where(made.step > made.tpot_limit, made.answer * made.step / np.maximum(made.requests - 1.0, 1.0), 0.0)
    until = np.maximum(late, crowded)
    low, high = RETRY_BOUNDS
    soonest = float(np.where(later & (until >= 0.0), until, np.inf).min())
    return min(max(soonest, low), high)
