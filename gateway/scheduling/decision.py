"""What a placement saw and chose, kept so that it can be told later.

Taking it costs a few gathers of numbers; they are turned into words only when somebody asks.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from cluster.node_table import ABSENT, DEVICE, TIERS, NodeTable
from gateway.scheduling.cost import Scores
from gateway.scheduling.request import PlacementRequest

MOST_CANDIDATES = 16
"""Told of one placement: the chosen one and the best of the others."""

Outcome = Literal["placed", "overloaded", "unavailable"]
TIER_NAMES = {number: name for name, number in TIERS.items()} | {ABSENT: "absent"}


class Candidate(msgspec.Struct, frozen=True):
    """A node that was able to serve the request. Times are in seconds; null where the policy does not reckon with
    them, and where the node has no performance model of its own: nothing is forecast of it then."""

    node: str
    chosen: bool
    age: float | None
    """Since the record that it was judged by came in."""
    tier: Literal["device", "host", "disk", "absent"]
    """Where the adapter was, as far as was known; `device` for the base alone."""
    running: int
    queued: int
    reserved: int
    """Places given away there that no record had told of yet."""
    model: Literal["measured", "assumed"]
    """Whether the node was judged by its own performance model, or by one of a mid-size GPU, of which no times are
    told."""
    model_problem: str | None
    """Why the one that it publishes is not used."""
    widened: bool = False
    """Its passes have taken other than its model says for a minute: what is forecast of it refuses nobody."""
    prefill: float | None = None
    """What the prompt adds to the prompts that wait."""
    exposed_load: float | None = None
    """What the first token waits for the adapter's bytes."""
    decode: float | None = None
    """What the request adds to every step."""
    step: float | None = None
    """A decode step with the request in the batch."""
    wait: float | None = None
    """Before its prompt is begun."""
    ttft: float | None = None
    """From its placement to its first token."""
    spreading: float | None = None
    """Charged for one more copy of the adapter, for the request and for each one there."""
    total: float | None = None
    """The least wins; null where it is infinite, see `broken`."""
    broken: list[str] = []
    """Which promises would be."""


class Decision(msgspec.Struct, frozen=True):
    """One placement. Times are in seconds."""

    outcome: Outcome
    node: str | None
    policy: str
    at: float
    """Unix time."""
    took: float
    tries: int
    """Choices made: another request may take the place that was chosen."""
    excluded: list[str]
    """Nodes that had failed this request."""
    prompt_tokens: int
    max_tokens: int
    expected_tokens: float
    expected_inverse: float
    """The mean of 1 / tokens of such answers."""
    rank: int
    adapter_bytes: int
    slo_class: str
    ttft: float | None
    """What was left of the promise when the request was placed."""
    tpot: float | None
    candidates: list[Candidate]
    more: int
    """Candidates that are not told."""


ONLY = np.zeros(1, np.int64)
SCORED = ("prefill", "exposed_load", "decode", "step", "wait", "ttft", "spreading", "total")
FIELDS = ("age", "running", "queued", "reserved", "modelled", "tier", *SCORED, "tpot_limit")
TERMS = ("tier", "prefill", "exposed", "decode", "step", "wait", "ttft", "spreading")
"""Of gateway.scheduling.cost.Terms, in the order that their FIELDS have."""


class Picture(msgspec.Struct):
    """The candidates of one choice, as they were then."""

    nodes: list[str]
    problems: list[str | None]
    widened: list[bool]
    values: np.ndarray
    """f64[FIELDS, candidates]; NaN: not known"""
    chosen: int | None
    """index"""
    more: int

    def candidates(self, request: PlacementRequest) -> list[Candidate]:
        return [self._candidate(index, request) for index in range(len(self.nodes))]

    def _candidate(self, index: int, request: PlacementRequest) -> Candidate:
        told = dict(zip(FIELDS, self.values[:, index].tolist(), strict=True))
        hidden = () if told["modelled"] else SCORED
        known = {name: value if math.isfinite(value) and name not in hidden else None for name, value in told.items()}
        figures: dict[str, Any] = {name: known[name] for name in ("age", *SCORED)}
        figures |= {name: int(told[name]) for name in ("running", "queued", "reserved")}
        return Candidate(
            node=self.nodes[index],
            chosen=index == self.chosen,
            tier=TIER_NAMES[int(told["tier"])],  # type: ignore[arg-type]
            model="measured" if told["modelled"] else "assumed",
            model_problem=self.problems[index],
            widened=self.widened[index],
            broken=_broken(told, request),
            **figures,
        )


def picture(
    nodes: NodeTable, candidates: np.ndarray, request: PlacementRequest, row: int | None, scores: Scores | None
) -> Picture:
    """`row`: the chosen one."""
    shown = _best(nodes, candidates, row, scores)
    rows = candidates[shown]
    values = np.full((len(FIELDS), rows.size), np.nan)
    values[0] = nodes.now - nodes.heard[rows]
    for index, where in enumerate(rows.tolist()):
        load = nodes.load(where)
        values[1:5, index] = load.running, load.queued, len(nodes.reservations(where)), nodes.modelled[where]
    if scores is None:
        tiers = nodes.tiers(request.digest) if request.digest else {}
        away = ABSENT if request.digest else DEVICE
        values[5] = [tiers.get(where, away) for where in rows.tolist()]
    else:
        columns = [getattr(scores.terms, name) for name in TERMS]
        for index, column in enumerate((*columns, scores.totals, scores.terms.tpot_limit), 5):
            values[index] = column[shown]
    listed = rows.tolist()
    return Picture(
        nodes=[nodes.ids[where] or "" for where in listed],
        problems=[nodes.model_problem(where) for where in listed],
        widened=[False] * len(listed) if scores is None else scores.widened[shown].tolist(),
        values=values,
        chosen=None if row is None else listed.index(row),
        more=candidates.size - len(listed),
    )


def _best(nodes: NodeTable, candidates: np.ndarray, row: int | None, scores: Scores | None) -> np.ndarray:
    """Indices of those to be told, the best first."""
    if candidates.size == 1:
        return ONLY
    order = scores.totals if scores is not None else nodes.requests[candidates]
    if candidates.size > MOST_CANDIDATES:
        shown = np.argpartition(order, MOST_CANDIDATES - 1)[:MOST_CANDIDATES]
    else:
        shown = np.arange(candidates.size)
    shown = shown[np.argsort(order[shown], kind="stable")]
    if row is not None:
        chosen = int(np.searchsorted(candidates, row))
        if chosen not in shown:
            shown[-1] = chosen
    return shown


def _broken(told: dict[str, float], request: PlacementRequest) -> list[str]:
    if math.isnan(told["step"]):
        return []
    reasons = []
    if not told["step"] <= told["tpot_limit"]:
        whose = "its own" if request.demand.tpot == told["tpot_limit"] else "another request's there"
        reasons.append(f"a step of {told['step']:.4g} s breaks {told['tpot_limit']:.4g} s between tokens, {whose}")
    if request.ttft is not None and not told["ttft"] <= request.ttft:
        reasons.append(f"a first token after {told['ttft']:.4g} s breaks its own {request.ttft:.4g} s")
    return reasons
