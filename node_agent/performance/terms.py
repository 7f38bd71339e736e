"""Terms of the performance model for the engine's passes."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.performance_fit import DecodeSample, PrefillSample
from cluster.performance_model import counted_rank
from node_agent.engine.rows import Row


def decode_sample(rows: Sequence[Row], seconds: float, padded_rank: int = 0) -> DecodeSample:
    """Returns the sample of a pass of decode rows alone. Its contexts are the tokens in the cache before the pass.
    `padded_rank`: that of the model with which the sample is compared."""
    ranks = [counted_rank(_rank(row), padded_rank) for row in rows]
    by_slot = {row.request.lease.slot: rank for row, rank in zip(rows, ranks, strict=True) if row.request.lease}
    return DecodeSample(
        rows=len(rows),
        contexts=sum(row.request.computed for row in rows),
        max_rank=len(rows) * max(ranks, default=0),
        request_ranks=sum(ranks),
        adapter_ranks=sum(by_slot.values()),
        seconds=seconds,
    )


def prefill_sample(rows: Sequence[Row], seconds: float, padded_rank: int = 0) -> PrefillSample:
    """Returns the sample of a pass of prompt chunks alone.

    Its square term is, for each chunk, the chunk's end squared minus its begin squared. The chunks of a prompt thus sum
    to the square of the prompt's length.
    """
    ends = [(row.request.computed, row.request.computed + row.length) for row in rows]
    return PrefillSample(
        tokens=sum(row.length for row in rows),
        squares=sum(end * end - begin * begin for begin, end in ends),
        token_ranks=sum(row.length * counted_rank(_rank(row), padded_rank) for row in rows),
        seconds=seconds,
    )


def _rank(row: Row) -> int:
    lease = row.request.lease
    return max(lease.ranks, default=0) if lease is not None else 0
