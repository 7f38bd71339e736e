"""The terms of the performance model, of passes as the engine computes them."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.performance_fit import DecodeSample, PrefillSample
from node_agent.engine.batch import Row


def decode_sample(rows: Sequence[Row], seconds: float) -> DecodeSample:
    """Returns the sample of a pass in which every row is a decode step. Contexts are the tokens in the cache when it
    begins."""
    ranks = [_rank(row) for row in rows]
    by_slot = {row.request.lease.slot: rank for row, rank in zip(rows, ranks, strict=True) if row.request.lease}
    return DecodeSample(
        rows=len(rows),
        contexts=sum(row.request.computed for row in rows),
        max_rank=len(rows) * max(ranks, default=0),
        request_ranks=sum(ranks),
        adapter_ranks=sum(by_slot.values()),
        seconds=seconds,
    )


def prefill_sample(rows: Sequence[Row], seconds: float) -> PrefillSample:
    """Returns the sample of a pass over prompts alone. A chunk behind others has the square of where it ends less that
    of where it begins, so that a prompt's chunks have the square of the prompt."""
    ends = [(row.request.computed, row.request.computed + row.length) for row in rows]
    return PrefillSample(
        tokens=sum(row.length for row in rows),
        squares=sum(end * end - begin * begin for begin, end in ends),
        token_ranks=sum(row.length * _rank(row) for row in rows),
        seconds=seconds,
    )


def _rank(row: Row) -> int:
    lease = row.request.lease
    return max(lease.ranks, default=0) if lease is not None else 0
