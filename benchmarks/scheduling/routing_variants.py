"""`rank_aware` with single terms switched off, or with ones that were tried and dropped: for the ablation, users see no
switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from cluster.node_table import DEVICE, STANDARD, NodeTable
from gateway.scheduling.cost import Terms
from gateway.scheduling.policy import Policy, make_policy
from gateway.scheduling.rank_aware import RankAware
from gateway.scheduling.request import RoutingRequest


@dataclass(frozen=True)
class Weights:
    """Switches of the policy's terms; the defaults are the policy."""

    others_weight: float = 1.0
    """weight of what the request adds to the others; it was 0.6"""
    others_prefill: bool = True
    spread: bool = True
    """a second before the first token weighs the mean of 1 / tokens; else 1 / expected tokens"""
    missed_pass: bool = False
    """a cold prompt counts one step more; dropped"""
    two_passes: bool = False
    """earlier prompts are in a separate pass; dropped, as they are in the one that computes it"""
    prompts: bool = True
    rows: bool = True
    exposed: bool = True
    step: bool = True
    rank: bool = True
    promises: bool = True
    copies: bool = True


class Variant(RankAware):
    def __init__(self, weights: Weights, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._weights = weights

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> int | None:
        if not self._weights.rank:
            request = msgspec.structs.replace(request, demand=msgspec.structs.replace(request.demand, rank=0))
        if not self._weights.spread:
            request = msgspec.structs.replace(request, expected_inverse=0.0)
        return super().choose(nodes, candidates, request)

    def _terms(self, nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest) -> Terms:
        terms, weights = super()._terms(nodes, candidates, request), self._weights
        prompts, before = nodes.prompt_wait[candidates, STANDARD], terms.wait
        if not weights.rows:
            terms.wait = prompts
        if not weights.prompts:
            terms.wait = terms.wait - prompts
        if weights.two_passes:
            terms.wait = terms.wait + np.where(prompts > 0.0, nodes.prefill_base[candidates], 0.0)
        terms.ttft = terms.ttft - before + terms.wait
        if not weights.exposed:
            terms.ttft, terms.exposed = terms.ttft - terms.exposed, np.zeros(candidates.size)
        if not weights.promises:
            terms.tpot_limit, terms.ttft_limit = np.full(candidates.size, np.inf), np.inf
        return terms

    def _plain(self, terms: Terms) -> np.ndarray:
        weights = self._weights
        first = terms.ttft + (terms.tier != DEVICE) * terms.step if weights.missed_pass else terms.ttft
        added = terms.decode + terms.prefill / terms.answer if weights.others_prefill else terms.decode
        step = terms.step if weights.step else terms.decode
        plain: np.ndarray = first * terms.inverse + step + weights.others_weight * (terms.requests - 1.0) * added
        if weights.copies:
            plain = plain + terms.requests * terms.spreading / terms.answer
        return plain


MINIMAL = Weights(others_prefill=False, spread=False, rows=False, step=False, promises=False)
"""The start of the screen: queue work, exposed load, and what this rank adds to the batch that it joins, times the
expected length; copies."""
VARIANTS: Mapping[str, Weights] = {
    "rank_aware": Weights(),
    "minimal": MINIMAL,
    "others 0.6": Weights(others_weight=0.6),
    "no prompt of others": Weights(others_prefill=False),
    "1 / mean": Weights(spread=False),
    "missed pass": Weights(missed_pass=True),
    "two passes": Weights(two_passes=True),
    "no prompt queue": Weights(prompts=False),
    "no row or memory wait": Weights(rows=False),
    "no load": Weights(exposed=False),
    "no own step": Weights(step=False),
    "no rank": Weights(rank=False),
    "no promises": Weights(promises=False),
    "no copies": Weights(copies=False),
}


def maker(name: str) -> Callable[[Callable[[], float]], Policy]:
    """Returns a function that makes a variant, or one of the gateway's policies."""
    if name in VARIANTS:
        return lambda clock: Variant(VARIANTS[name], clock)
    return lambda _: make_policy(name)
