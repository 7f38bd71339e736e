"""Limits of a pass that keep the promised time between strict requests' tokens. The chunk of prompts follows the
promise, as in Sarathi-Serve (Agrawal et al., OSDI 2024), and best effort pauses where it would leave strict requests
too little."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from math import inf

from cluster.node_load import MARGIN, tightest_tpot
from cluster.performance_fit import decode_forecast
from cluster.performance_model import PerformanceModel
from node_agent.engine.batch import Row
from node_agent.engine.request import Request
from node_agent.performance.terms import decode_sample

BESIDE_FLOOD = 2.0
"""Factor by which a pass during a flood may take longer than its decode rows take by themselves."""
MIN_BESIDE_FLOOD, UNKNOWN_SHARE = 16, 4
"""Fractions 1/n of an iteration's prompt tokens that are computed during a flood: at least, and where nothing is known
of passes."""
MAX_PAUSES = 3
"""Passes in succession that a best-effort request sits out: it takes part in every fourth, whatever others ask for."""


def tightest_promise(running: Iterable[Request], model: PerformanceModel) -> float | None:
    """Returns the fewest seconds between tokens that were promised to strict requests that decode. A time that the node
    could not keep for one alone is no promise."""
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
    """Returns the requests that decode in the next pass, and the prompt tokens for which the iteration has time after
    the `used` ones. All decode, and the tokens are infinite, where nobody strict decodes who was promised a time
    between tokens, or nothing is known of passes.

    Where strict requests' next tokens, or their prompts (of `prompts`, which the pass could compute; an iteration has
    `chunk_tokens` tokens of them), would find too little time, best-effort requests keep what they have and sit the
    pass out, as few as will do. At least `min_tokens` are returned: a promise that decode rows alone break must not
    stop prompts. `slower`: how much longer than forecast passes over both take. That they take less is no reason to
    plan with more: they vary.
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
    """Returns the prompt tokens of the batch's next pass that don't make it long for newcomers. At least one of
    MIN_BESIDE_FLOOD of `chunk_tokens` is returned, so that prompts advance."""
    if model is None:
        return chunk_tokens // UNKNOWN_SHARE
    if not decoding:
        spare = model.decode.seconds(1, 0, 0) / model.prefill.per_token if model.prefill.per_token > 0 else inf
    else:
        sample = decode_sample([Row(request, 1) for request in decoding], 0.0)
        spare = _spare_tokens(model, decoding, BESIDE_FLOOD * decode_forecast(model.decode, sample))
    return max(spare, chunk_tokens // MIN_BESIDE_FLOOD)


def _fewest(max_count: int, target: float, spare: Callable[[int], float]) -> int:
    """Returns the smallest number, up to `max_count`, for which `spare`, which grows with it, reaches the target. Where
    no number does, returns the one that comes nearest to it but for a token: nobody pauses for nothing."""
    if spare(max_count) < target:
        target = spare(max_count) - 1.0
    return bisect_left(range(max_count), True, key=lambda count: spare(count) >= target)


def paused_on_average(running: Iterable[Request]) -> tuple[int, int]:
    """Rows and tokens of contexts that passes have fewer on average while best effort pauses as often as it may."""
    contexts = [r.computed for r in running if r.decoding and r.slo_class == "best_effort"]
    return (len(contexts) * MAX_PAUSES // (MAX_PAUSES + 1), sum(contexts) * MAX_PAUSES // (MAX_PAUSES + 1))


def _may_pause(request: Request) -> bool:
    return request.slo_class == "best_effort" and request.pauses < MAX_PAUSES


def _spare_tokens(model: PerformanceModel, decoding: Sequence[Request], seconds: float) -> float:
    """Returns the prompt tokens for which a pass of `seconds` has time."""
    sample = decode_sample([Row(request, 1) for request in decoding], 0.0)
    remaining_s = seconds - decode_forecast(model.decode, sample)
    per_token = model.prefill.per_token + model.prefill.per_token_rank * sample.max_rank / sample.rows
    if per_token > 0:
        return remaining_s / per_token
    return inf if remaining_s >= 0 else -inf
