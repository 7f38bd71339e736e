"""Snapshots of routing decisions, for `/explain`: what the policy saw and what it chose.

A snapshot costs a few array reads; the reply is built only when a client asks for it.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from cluster.node_table import ABSENT, DEVICE, TIERS, NodeTable
from gateway.scheduling.cost import Scores
from gateway.scheduling.request import RoutingRequest

MAX_CANDIDATES = 16
"""Maximum candidates that a decision lists: the chosen one and the best of the others."""

Outcome = Literal["routed", "overloaded", "unavailable"]
TIER_NAMES = {number: name for name, number in TIERS.items()} | {ABSENT: "absent"}


class Candidate(msgspec.Struct, frozen=True):
    """A node that was able to serve the request, with what the policy knew about it. Times are in seconds. A forecast
    is null if the policy does not use it, or if the node has not published a performance model."""

    node: str
    chosen: bool
    age: float | None
    """Age of the node's record at the time of the decision, in seconds."""
    tier: Literal["device", "host", "disk", "absent"]
    running: int
    queued: int
    reserved: int
    """Number of places reserved on the node for requests that its record does not include yet."""
    model: Literal["measured", "assumed"]
    """Performance model of the node. `measured`: the node published its own model. `assumed`: the model of a mid-size
    GPU is used, and no times are shown."""
    model_problem: str | None
    widened: bool = False
    """True if the node's performance model has been inaccurate for a minute, so that its forecasts refuse no
    request."""
    prefill: float | None = None
    exposed_load: float | None = None
    decode: float | None = None
    step: float | None = None
    wait: float | None = None
    ttft: float | None = None
    spreading: float | None = None
    """Time to reload what one more copy of the adapter displaces. The total counts it once for this request and once
    for each request on the node."""
    total: float | None = None
    """Total cost; the lowest wins. Null if it is infinite, because the SLO targets in `broken` would be violated."""
    broken: list[str] = []


class Decision(msgspec.Struct, frozen=True):
    """A routing decision. Times are in seconds, `at` in Unix time."""

    outcome: Outcome
    node: str | None
    policy: str
    at: float
    took: float
    tries: int
    """Number of times that the policy chose. It chooses again if another request takes the chosen place first."""
    excluded: list[str]
    prompt_tokens: int
    max_tokens: int
    expected_tokens: float
    expected_inverse: float
    rank: int
    adapter_bytes: int
    slo_class: str
    ttft: float | None
    """TTFT target, less the time that had passed when the request was routed."""
    tpot: float | None
    candidates: list[Candidate]
    more: int


ONLY = np.zeros(1, np.int64)
SCORED = ("prefill", "exposed_load", "decode", "step", "wait", "ttft", "spreading", "total")
FIELDS = ("age", "running", "queued", "reserved", "modelled", "tier", *SCORED, "tpot_limit")
TERMS = ("tier", "prefill", "exposed", "decode", "step", "wait", "ttft", "spreading")
"""Attributes of gateway.scheduling.cost.Terms, in the order of FIELDS."""


class Snapshot(msgspec.Struct):
    """Candidates of one choice, as they were when it was made."""

    nodes: list[str]
    problems: list[str | None]
    widened: list[bool]
    values: np.ndarray
    """f64[number of FIELDS, number of candidates]: values of the fields; NaN if unknown."""
    chosen: int | None
    more: int

    def candidates(self, request: RoutingRequest) -> list[Candidate]:
        return [self._candidate(index, request) for index in range(len(self.nodes))]

    def _candidate(self, index: int, request: RoutingRequest) -> Candidate:
        values = dict(zip(FIELDS, self.values[:, index].tolist(), strict=True))
        hidden = () if values["modelled"] else SCORED
        finite = {
            name: value if math.isfinite(value) and name not in hidden else None for name, value in values.items()
        }
        figures: dict[str, Any] = {name: finite[name] for name in ("age", *SCORED)}
        figures |= {name: int(values[name]) for name in ("running", "queued", "reserved")}
        return Candidate(
            node=self.nodes[index],
            chosen=index == self.chosen,
            tier=TIER_NAMES[int(values["tier"])],  # type: ignore[arg-type]
            model="measured" if values["modelled"] else "assumed",
            model_problem=self.problems[index],
            widened=self.widened[index],
            broken=_broken(values, request),
            **figures,
        )


def take_snapshot(
    nodes: NodeTable, candidates: np.ndarray, request: RoutingRequest, row: int | None, scores: Scores | None
) -> Snapshot:
    """Returns a snapshot of a policy's choice. `row`: the chosen node's row; None if all were refused."""
    shown = _best(nodes, candidates, row, scores)
    rows = candidates[shown]
    values = np.full((len(FIELDS), rows.size), np.nan)
    values[0] = nodes.now - nodes.last_seen[rows]
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
    return Snapshot(
        nodes=[nodes.ids[where] or "" for where in listed],
        problems=[nodes.model_problem(where) for where in listed],
        widened=[False] * len(listed) if scores is None else scores.widened[shown].tolist(),
        values=values,
        chosen=None if row is None else listed.index(row),
        more=candidates.size - len(listed),
    )


def _best(nodes: NodeTable, candidates: np.ndarray, row: int | None, scores: Scores | None) -> np.ndarray:
    """Returns the indices of the candidates to list, best first."""
    if candidates.size == 1:
        return ONLY
    order = scores.totals if scores is not None else nodes.requests[candidates]
    if candidates.size > MAX_CANDIDATES:
        shown = np.argpartition(order, MAX_CANDIDATES - 1)[:MAX_CANDIDATES]
    else:
        shown = np.arange(candidates.size)
    shown = shown[np.argsort(order[shown], kind="stable")]
    if row is not None:
        chosen = int(np.searchsorted(candidates, row))
        if chosen not in shown:
            shown[-1] = chosen
    return shown


def _broken(values: dict[str, float], request: RoutingRequest) -> list[str]:
    if math.isnan(values["step"]):
        return []
    reasons = []
    if not values["step"] <= values["tpot_limit"]:
        owner = "its own" if request.demand.tpot == values["tpot_limit"] else "another request's there"
        reasons.append(f"a step of {values['step']:.4g} s breaks {values['tpot_limit']:.4g} s between tokens, {owner}")
    if request.ttft is not None and not values["ttft"] <= request.ttft:
        reasons.append(f"a first token after {values['ttft']:.4g} s breaks its own {request.ttft:.4g} s")
    return reasons
