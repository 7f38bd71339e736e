"""The default policy: the node on which the request costs least, among those on which it breaks no promise.

    total = cost * (running + waiting + reserved + 1) + wait / expected tokens

What a request adds is felt by all who are there, its wait by itself alone. Without the wait, requests of like ranks
would pile up where their rank fits, behind nodes whose rows are all taken. The 1 is the request itself. Algorithm 1
leaves it out, so that every idle node is free, whether it has the adapter or not, and an idle node that breaks a
promise costs infinity * 0, which is NaN (gateway.scheduling.toppings).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cluster.node_table import NodeTable
from gateway.scheduling.cost import Terms, attainable, terms
from gateway.scheduling.request import PlacementRequest
from gateway.scheduling.scores import Scores, ScoringPolicy
from gateway.scheduling.spreading import Spreading

EQUAL = 1e-9
"""Totals that differ by less than this part are the same but for rounding."""
RETRY_BOUNDS = (1.0, 30.0)
"""Seconds; a forecast beyond a batch's answers is worth little."""


class RankAware(ScoringPolicy):
    """`gateways`: processes that place requests, of which this is one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, gateways: int = 1) -> None:
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
        plain = made.cost * made.requests + made.wait / made.answer
        # Comparisons with NaN are false: what can't be forecast never wins.
        totals = np.where((made.strain <= 1.0) & (plain < np.inf), plain, np.inf)
        spreading = self._charge(nodes, made, request, totals)
        if spreading is not None:
            totals = totals + spreading / made.answer * made.requests
        return Scores(made, totals, spreading)

    def _charge(
        self, nodes: NodeTable, made: Terms, request: PlacementRequest, totals: np.ndarray
    ) -> np.ndarray | None:
        """What one more copy of the adapter displaces, and must be loaded again: as long as its own transfer."""
        if request.digest is None:
            return None
        inside = self._at_home(nodes, made.candidates, request.digest)
        if not any(totals[index] < np.inf for index in inside):  # nobody at home, or no room there
            return None
        charge = made.transfer.copy()
        charge[inside] = 0.0
        return charge

    def _at_home(self, nodes: NodeTable, candidates: np.ndarray, digest: str) -> list[int]:
        """Indices of candidates."""
        found = []
        for node_id in list(self._spreading.homes(digest)):
            row = nodes.row(node_id)
            if row is None:
                self._spreading.forget(digest, node_id)
                continue
            index = int(candidates.searchsorted(row))
            if index < candidates.size and candidates[index] == row:
                found.append(index)
        return found

    def _note(self, nodes: NodeTable, row: int, best: int, request: PlacementRequest, made: Terms) -> None:
        node_id = nodes.ids[row]
        if request.digest is None or node_id is None:
            return
        seconds = float(made.prefill[best] + made.exposed[best] + made.answer * made.step[best])
        self._spreading.note(request.digest, node_id, request.id, seconds, int(nodes.max_rows[row]))


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
    cost = made.cost * made.requests + made.wait / made.answer
    finite = [np.where(values >= 0.0, values, np.inf) for values in (cost, made.strain)]
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
