"""How much may be computed beside strict requests' next tokens, so that the time between two tokens is what was
promised: the chunk of prompts follows the promise, as in Sarathi-Serve (Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from cluster.performance_fit import decode_forecast
from cluster.performance_model import PerformanceModel
from node_agent.engine.batch import Row
from node_agent.engine.request import Request
from node_agent.performance.terms import decode_sample

MARGIN = 0.8
"""Of a promise, that is planned with: forecasts err, and passes vary."""


def spare_tokens(model: PerformanceModel | None, running: Iterable[Request], least: int, slower: float = 1.0) -> float:
    """Prompt tokens for which an iteration has time; infinite where nobody strict decodes who was promised a time
    between tokens, or nothing is known of passes.

    At least `least`: a promise that decode rows alone would break must not stop prompts. `slower`: how much longer than
    forecast passes over both take. That they take less is no reason to plan with more: they vary.
    """
    rows = [Row(request, 1) for request in running if request.decoding]
    strict = [row.request.tpot for row in rows if row.request.slo_class == "strict" and row.request.tpot is not None]
    if model is None or not strict:
        return inf
    sample = decode_sample(rows, 0.0)
    seconds = MARGIN * min(strict) / max(1.0, slower) - decode_forecast(model.decode, sample)
    per_token = model.prefill.per_token + model.prefill.per_token_rank * sample.max_rank / sample.rows
    return max(seconds / per_token if per_token > 0 else inf, least)
