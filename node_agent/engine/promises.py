"""What may be computed beside strict requests' next tokens, so that the time between two tokens is what was promised:
the chunk of prompts follows the promise, as in Sarathi-Serve (Agrawal et al., OSDI 2024), and best effort pauses where
it would leave strict requests too little."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from cluster.performance_fit import decode_forecast
from cluster.performance_model import PerformanceModel
from node_agent.engine.batch import Row
from node_agent.engine.request import Request
from node_agent.performance.terms import decode_sample

MARGIN = 0.8
"""Of a promise, that is planned with: forecasts err, and passes vary."""
MOST_PAUSES = 3
"""Passes in succession that a best-effort request sits out: it goes on in every fourth, whatever others ask for."""


def tightest_promise(running: Iterable[Request]) -> float | None:
    """Seconds between tokens, of strict requests that decode."""
    strict = (r for r in running if r.decoding and r.slo_class == "strict")
    return min((r.tpot for r in strict if r.tpot is not None), default=None)


def within_promise(
    model: PerformanceModel | None,
    decoding: list[Request],
    prompts: Iterable[Request],
    most: int,
    least: int,
    slower: float = 1.0,
) -> tuple[list[Request], float]:
    """Who of those that could decode do so in the next pass, and the prompt tokens for which the iteration has time;
    all and infinite where nobody strict decodes who was promised a time between tokens, or nothing is known of passes.

    Where strict requests' next tokens, or their prompts (of which a pass has `most` tokens), would find too little
    time, best-effort requests keep what they have and sit the pass out, as few as will do. At least `least` tokens: a
    promise that decode rows alone break must not stop prompts. `slower`: how much longer than forecast passes over both
    take. That they take less is no reason to plan with more: they vary.
    """
    promised = tightest_promise(decoding)
    if model is None or promised is None:
        return decoding, inf
    seconds = MARGIN * promised / max(1.0, slower)
    may_pause = sorted((r for r in decoding if _may_pause(r)), key=lambda request: request.pauses)

    def without(count: int) -> list[Request]:
        paused = set(may_pause[:count])
        return [r for r in decoding if r not in paused]

    def spare(count: int) -> float:
        return _spare_tokens(model, without(count), seconds)

    wanted = min(most, sum(len(r.tokens) - r.computed for r in prompts if r.slo_class == "strict"))
    fewest = bisect_left(range(len(may_pause)), True, key=lambda count: spare(count) >= wanted)
    taking_part = without(fewest)
    for request in may_pause[:fewest]:
        request.pauses += 1
    for request in taking_part:
        request.pauses = 0
    return taking_part, max(spare(fewest), least)


def paused_on_average(running: Iterable[Request]) -> tuple[int, int]:
    """Rows and tokens of contexts that passes have fewer on average while best effort pauses as often as it may."""
    contexts = [r.computed for r in running if r.decoding and r.slo_class == "best_effort"]
    return (len(contexts) * MOST_PAUSES // (MOST_PAUSES + 1), sum(contexts) * MOST_PAUSES // (MOST_PAUSES + 1))


def _may_pause(request: Request) -> bool:
    return request.slo_class == "best_effort" and request.pauses < MOST_PAUSES


def _spare_tokens(model: PerformanceModel, decoding: Sequence[Request], seconds: float) -> float:
    """Prompt tokens that a pass of so many seconds has time for."""
    sample = decode_sample([Row(request, 1) for request in decoding], 0.0)
    left = seconds - decode_forecast(model.decode, sample)
    per_token = model.prefill.per_token + model.prefill.per_token_rank * sample.max_rank / sample.rows
    return left / per_token if per_token > 0 else inf
