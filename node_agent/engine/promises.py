"""Limits on passes that keep the promised time per output token of strict requests.

Prompt chunks are sized by the promise, as in Sarathi-Serve (Agrawal et al., OSDI 2024). Best-effort requests pause if
strict ones would otherwise have too little time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from math import inf

from cluster.node_load import MARGIN, tightest_tpot
from cluster.performance_fit import decode_forecast
from cluster.performance_model import PerformanceModel
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.performance.terms import decode_sample

BESIDE_FLOOD = 2.0
"""Factor by which a pass during a flood may be longer than one of its decode rows alone. A flood is best-effort load,
or a tenant that asks for more than the node has."""
MIN_BESIDE_FLOOD, UNKNOWN_SHARE = 16, 4
"""Divisors of an iteration's maximum of prompt tokens. The first gives the minimum that is computed during a flood, the
second the number without a performance model."""
MAX_PAUSES = 3
"""Maximum number of consecutive passes that a best-effort request sits out: it takes part in at least every fourth."""


def tightest_promise(running: Iterable[Request], model: PerformanceModel) -> float | None:
    """Returns the smallest promised seconds per output token of decoding strict requests; None without a promise.
    Ignores promises that the node could not keep even for a single request."""
    strict = (r.tpot for r in running if r.decoding and r.slo_class == "strict" and r.tpot is not None)
    tightest = tightest_tpot(strict, model)
    return tightest if tightest < inf else None


def within_promise(
    model: PerformanceModel | None,
    decoding: list[Request],
    prompts: Sequence[Request],
    chunk_tokens: int,
    min_tokens: int,
    slower: float = 1.0,
    used: int = 0,
) -> tuple[list[Request], float]:
    """Returns the requests that decode in the next pass, and the number of prompt tokens that still fit in the
    iteration.

    All of `decoding` decode, and the number is infinite, if no decoding strict request has a promise or there is no
    performance model. If strict requests would otherwise break a promise, as few best-effort requests as necessary sit
    the pass out.

    `prompts`: requests whose prompts the pass could compute; `chunk_tokens`: maximum prompt tokens per iteration;
    `used`: those that the iteration has already used. Before `used` is subtracted, the number is at least `min_tokens`,
    so that prompts advance even if decode rows alone break a promise. `slower`: ratio of measured to forecast time of
    passes with both prompts and decode rows; a ratio below 1 is ignored, since times vary.
    """
    promised = tightest_promise(decoding, model) if model is not None else None
    if model is None or promised is None:
        for request in decoding:
            request.pauses = 0
        return decoding, inf
    planned = MARGIN * promised
    mixed = planned / max(1.0, slower)
    seconds = mixed if prompts or used else planned
    may_pause = sorted(
        (r for r in decoding if _may_pause(r)), key=lambda request: (request.pauses, request.pauses_in_all)
    )

    def without(count: int) -> list[Request]:
        paused = set(may_pause[:count])
        return [r for r in decoding if r not in paused]

    strict_tokens = min(chunk_tokens, used + sum(r.uncomputed for r in prompts if r.slo_class == "strict"))
    fewest = _fewest(len(may_pause), strict_tokens, lambda count: _spare_tokens(model, without(count), seconds))
    taking_part = without(fewest)
    for request in may_pause[:fewest]:
        request.pauses += 1
        request.pauses_in_all += 1
    for request in taking_part:
        request.pauses = 0
    return taking_part, max(_spare_tokens(model, taking_part, mixed), min_tokens) - used


def beside_flood(model: PerformanceModel | None, decoding: Sequence[Request], chunk_tokens: int) -> float:
    """Returns the number of prompt tokens that the next pass may compute during a flood, so that new requests wait
    little for its end. It is at least `chunk_tokens` / MIN_BESIDE_FLOOD, so that prompts advance."""
    if model is None:
        return chunk_tokens // UNKNOWN_SHARE
    if not decoding:
        spare = model.decode.seconds(1, 0, 0) / model.prefill.per_token if model.prefill.per_token > 0 else inf
    else:
        sample = decode_sample([Row(request, 1) for request in decoding], 0.0)
        spare = _spare_tokens(model, decoding, BESIDE_FLOOD * decode_forecast(model.decode, sample))
    return max(spare, chunk_tokens // MIN_BESIDE_FLOOD)


def _fewest(max_count: int, target: float, spare: Callable[[int], float]) -> int:
    """Returns the smallest number up to `max_count` for which the function `spare` reaches the target. `spare`
    increases with the number.

    If it never reaches the target, returns the smallest number whose result is within one token of the best, so that no
    request pauses for nothing.
    """
    if spare(max_count) < target:
        target = spare(max_count) - 1.0
    return bisect_left(range(max_count), True, key=lambda count: spare(count) >= target)


def paused_on_average(running: Iterable[Request]) -> tuple[int, int]:
    """Returns by how many decode rows, and by how many context tokens, pauses reduce a pass on average. It assumes that
    best-effort requests pause as often as they may."""
    contexts = [r.computed for r in running if r.decoding and r.slo_class == "best_effort"]
    return (len(contexts) * MAX_PAUSES // (MAX_PAUSES + 1), sum(contexts) * MAX_PAUSES // (MAX_PAUSES + 1))


def _may_pause(request: Request) -> bool:
    return request.slo_class == "best_effort" and request.pauses < MAX_PAUSES


def _spare_tokens(model: PerformanceModel, decoding: Sequence[Request], seconds: float) -> float:
    """Returns the number of prompt tokens that fit in a pass of `seconds` seconds together with a token of each request
    in `decoding`."""
    sample = decode_sample([Row(request, 1) for request in decoding], 0.0)
    remaining_s = seconds - decode_forecast(model.decode, sample)
    per_token = model.prefill.per_token + model.prefill.per_token_rank * sample.max_rank / sample.rows
    if per_token > 0:
        return remaining_s / per_token
    return inf if remaining_s >= 0 else -inf
