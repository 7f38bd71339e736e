"""Events of a request: prompt log probabilities, and the end with its times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cluster.messages import ColdStart
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.ipc import Finished, PromptScored, Top

if TYPE_CHECKING:
    from node_agent.types import ScoredToken

SCORES_PER_EVENT = 256
"""Prompt tokens per event. With 64 alternatives each, the event stays below a megabyte."""


def expired(request: Request) -> tuple[str, str, str]:
    """Returns the end of a request whose deadline has passed: reason, error type and error text."""
    if request.generated:
        return "timeout", "", ""
    if request.admitted:
        return "error", "timeout", "no token was ready before the deadline"
    return "error", "unavailable", "the deadline passed while the request was queued"


def finished(request: Request, reason: str, error_type: str, error: str, *, damaged: bool = False) -> Finished:
    """Returns the last message of a request, with its times."""
    now = time.monotonic()
    held_s = request.held_s if request.admitted else 0.0
    return Finished(
        id=request.id,
        reason=reason,
        queue=(request.admitted or now) - request.arrived - held_s,
        prefill=(request.first_token or now) - request.admitted + held_s if request.admitted else 0.0,
        cold_start=_cold_start(request, now),
        error_type=error_type,
        error=error,
        damaged=damaged,
        preemptions=request.preemptions,
        device=request.device_seconds,
        cached_tokens=request.cached_tokens,
    )


def _cold_start(request: Request, now: float) -> ColdStart:
    cold = request.cold
    if cold is None:
        return ColdStart(request.arrival_tier, "none", 0.0, 0.0)
    exposed = cold.exposed
    if (
        not cold.load
    ):  # it ended before its adapter was loaded: it waited until now if it had not begun or could not continue
        since = cold.waits_since if cold.opened else cold.started_at
        exposed += now - since if since else 0.0
    return ColdStart(
        request.arrival_tier,
        cold.plan,
        cold.load,
        exposed,
        fetch=cold.fetch,
        layers_cpu=cold.layers_cpu,
        layers_device=cold.layers_device,
        replays=cold.replays,
        forecast=cold.forecast,
    )


def end_of(request: Request, eos_ids: frozenset[int]) -> str | None:
    """Returns why the request's last token ends it: stop or length. Returns None if it continues."""
    token = request.tokens[-1]
    if token in request.sampling.stop_token_ids or (token in eos_ids and not request.ignore_eos):
        return "stop"
    if request.grammar is not None and request.grammar.ended:
        return "stop"
    return "length" if request.generated >= request.max_tokens else None


def split_scores(rows: list[Row], scores: list[ScoredToken]) -> list[tuple[Request, range, list[ScoredToken]]]:
    """Returns (request, positions of its scored prompt tokens, scores) for each row with prompt scores. Must be called
    before `computed` changes, since the positions depend on it."""
    split: list[tuple[Request, range, list[ScoredToken]]] = []
    begin = 0
    for row in rows if scores else ():
        places = row.scored
        if places:
            split.append((row.request, places, scores[begin : begin + len(places)]))
            begin += len(places)
    return split


def score_events(request: Request, places: range, scores: list[ScoredToken]) -> list[PromptScored]:
    """Returns messages with prompt scores, of at most SCORES_PER_EVENT tokens each."""
    tops = [Top(score.logprob, score.top, score.rank) for score in scores]
    return [
        PromptScored(request.id, places.start + at, tops[at : at + SCORES_PER_EVENT])
        for at in range(0, len(tops), SCORES_PER_EVENT)
    ]
