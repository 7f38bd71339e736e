"""`rank_aware` with single terms switched off or set to a neutral value: for the ablation, users see no switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from cluster.node_table import DEVICE, NodeTable
from gateway.scheduling import rank_aware
from gateway.scheduling.cost import Terms, terms
from gateway.scheduling.policy import Policy, make_policy
from gateway.scheduling.rank_aware import RankAware
from gateway.scheduling.request import PlacementRequest
from gateway.scheduling.scores import Scores


@dataclass(frozen=True)
class Weights:
    """As the policy has them."""

    others: float = rank_aware.OTHERS
    """of what the request adds to the others"""
    others_prefill: bool = True
    """its prompt counts among that"""
    spread: bool = True
    """a second before the first token weighs the mean of 1 / tokens; else 1 / expected tokens"""
    missed_pass: bool = True
    """a cold prompt counts one step more"""
    prompts: bool = True
    """it waits for the prompts before it"""
    two_passes: bool = True
    """which are in a pass of their own, before the one with its prompt; else in the same one"""
    rows: bool = True
    """it waits for a row, or for memory"""
    exposed: bool = True
    """it waits for its adapter's bytes"""
    link: bool = True
    """which come behind others on the link"""
    step: bool = True
    """its own step's length counts"""
    rank: bool = True
    """its rank is known"""
    promises: bool = True
    """a node where a promise would be broken is out, also for those that are not strict"""
    least_bad: bool = True
    """where all break one, the one that breaks it least; else the least total"""
    ties: bool = True
    homes: bool = True
    copies: bool = False
    """no homes: a node that does not have the adapter pays for the copy that it displaces"""
    one_home: bool = False
    """however much an adapter is asked for"""


class Variant(RankAware):
    def __init__(self, weights: Weights, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._weights = weights

    def choose(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> int | None:
        weights = self._weights
        seen = request
        if not weights.rank:
            seen = msgspec.structs.replace(seen, rank=0)
        if not weights.spread:
            seen = msgspec.structs.replace(seen, expected_inverse=0.0)
        with np.errstate(all="ignore"):
            made = self._terms(nodes, candidates, seen)
            plain = self._plain(made)
            kept = made.strain <= 1.0 if weights.promises else np.full(plain.size, True)
            totals = np.where(kept & (plain < np.inf), plain, np.inf)
            if weights.homes:
                charge = self._charge(nodes, made, seen, totals)
                if charge is not None:
                    totals = np.fmin(totals + charge / made.answer * made.requests, np.inf)
            if weights.copies:
                charge = np.where(made.tier == DEVICE, 0.0, made.transfer)
                totals = np.fmin(totals + charge / made.answer * made.requests, np.inf)
            scores = self.last = Scores(made, totals)
            best = rank_aware._best(nodes, scores) if weights.ties else _first(totals)
            if best is None:
                best = rank_aware._least_bad(scores) if weights.least_bad else int(np.nanargmin(plain))
        row = int(candidates[best])
        self._note(nodes, row, best, seen, made)
        digest = request.digest or ""
        if weights.one_home and (adapter := self._spreading._adapters.get(digest)) is not None:
            adapter.wanted, adapter.homes = 1, {nodes.ids[row] or "": None}
        return row

    def _terms(self, nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest) -> Terms:
        made, weights = terms(nodes, candidates, request), self._weights
        prompts = nodes.prompt_wait[candidates]
        if not weights.rows:
            made.ttft, made.wait = made.ttft - made.wait + prompts, prompts
        if not weights.prompts:
            made.ttft, made.wait = made.ttft - prompts, made.wait - prompts
        if not weights.two_passes:
            base = np.where(prompts > 0.0, nodes.prefill_base[candidates], 0.0)
            made.ttft, made.wait = made.ttft - base, made.wait - base
        exposed = made.exposed
        if not weights.link:
            ahead = nodes.device_wait[candidates] - nodes.device_latency[candidates]
            exposed = exposed - np.where(made.tier == DEVICE, 0.0, ahead * nodes.exposed_share[candidates])
            made.transfer = made.transfer - ahead
        if not weights.exposed:
            exposed = np.zeros(exposed.size)
        made.ttft, made.exposed = made.ttft - made.exposed + exposed, exposed
        return made

    def _plain(self, made: Terms) -> np.ndarray:
        weights = self._weights
        first = made.ttft + (made.tier != DEVICE) * made.step if weights.missed_pass else made.ttft
        added = made.decode + made.prefill / made.answer if weights.others_prefill else made.decode
        others = (made.requests - 1.0) * added
        own = made.step if weights.step else made.decode
        plain: np.ndarray = first * made.inverse + own + weights.others * others
        return plain


def _first(totals: np.ndarray) -> int | None:
    best = int(totals.argmin())
    return best if totals[best] < np.inf else None


MINIMAL = Weights(
    others=1.0, others_prefill=False, spread=False, missed_pass=False, rows=False, step=False, promises=False,
    least_bad=False, ties=False,
)  # fmt: skip
"""The start of the screen: queue work, exposed load, and what this rank adds to the batch that it joins, times the
expected length; homes."""
KEPT = Weights(others=1.0, homes=False, copies=True, missed_pass=False, two_passes=False)
"""What the screen left."""
VARIANTS: Mapping[str, Weights] = {
    "today": Weights(),
    "minimal": MINIMAL,
    "kept": KEPT,
    "others 1": Weights(others=1.0),
    "no prompt of others": Weights(others_prefill=False),
    "1 / mean": Weights(spread=False),
    "no missed pass": Weights(missed_pass=False),
    "no prompt queue": Weights(prompts=False),
    "no row or memory wait": Weights(rows=False),
    "no load": Weights(exposed=False),
    "no own step": Weights(step=False),
    "no rank": Weights(rank=False),
    "no promises": Weights(promises=False, least_bad=False),
    "no homes": Weights(homes=False),
    "one home": Weights(one_home=True),
    "one pass": Weights(two_passes=False),
}


def maker(name: str) -> Callable[[Callable[[], float]], Policy]:
    """Of a variant, or of one of the gateway's policies."""
    if name in VARIANTS:
        return lambda clock: Variant(VARIANTS[name], clock)
    return lambda _: make_policy(name)
