"""Which rows a pass of adapters that are there computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from node_agent.engine.batch import Row
from node_agent.engine.request import Request

Loaded = Callable[[Request], bool]
Turn = Callable[[Request], float]


def choose_hot(
    decoding: Iterable[Request],
    prompts: Iterable[Request],
    loaded: Loaded,
    chunk_tokens: int,
    spare: float,
    turn: Turn,
) -> tuple[list[Row], int]:
    """Rows of the next hot pass (decode rows first, each part in order of adapter slots), and how many decode.

    Each of `decoding` advances by a token. Chunks of `prompts` have at most what the decode rows leave of
    `chunk_tokens`, and at most `spare` tokens (infinite: no such bound; negative: there is no time); at least one token
    in any case, so that prompts go on.
    """
    decode = sorted((Row(request, 1) for request in decoding), key=_slot)
    tokens = max(int(min(chunk_tokens - len(decode), spare)), 1)
    return decode + choose_prompts(prompts, loaded, tokens, turn), len(decode)


def choose_prompts(requests: Iterable[Request], loaded: Loaded, tokens: int, turn: Turn) -> list[Row]:
    """Chunks of so many tokens together, in order of adapter slots: of strict requests first, then of those of the
    least `turn` (their tenants' counters), then of the oldest. None of what a cold pass computes."""
    rows: list[Row] = []
    for request in sorted(requests, key=lambda request: (request.slo_class != "strict", turn(request))):
        if not tokens:
            break
        if request.in_cold_pass or not loaded(request):
            continue
        length = min(request.uncomputed, tokens)
        rows.append(Row(request, length))
        tokens -= length
    rows.sort(key=_slot)
    return rows


def _slot(row: Row) -> int:
    return -1 if row.request.lease is None else row.request.lease.slot
