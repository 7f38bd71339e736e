"""A node whose adapters are all there, iteration by iteration and token by token: slow, and written apart from the
simulator, to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field

from garnish.simulation.job import Job
from garnish.simulation.profile import NodeProfile


@dataclass(eq=False)
class Row:
    job: Job
    computed: int = 0
    tokens: list[float] = field(default_factory=list)
    """when each was there"""


def step_by_step(jobs: list[Job], profile: NodeProfile) -> dict[int, list[float]]:
    """Times of each request's tokens. `jobs` by ascending `at`."""
    coming, queue, rows = list(jobs), list[Job](), list[Row]()
    found: dict[int, list[float]] = {}
    now = 0.0
    while coming or queue or rows:
        if not queue and not rows:
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            queue.append(coming.pop(0))
        while (
            queue
            and len(rows) < profile.max_rows
            and _reserved(rows, profile) + _kv(queue[0], profile) <= (profile.kv_tokens)
        ):
            rows.append(Row(queue.pop(0)))
        now += _iterate(rows, profile)
        for row in [row for row in rows if len(row.tokens) < row.job.output and row.computed >= row.job.prompt]:
            if row.computed == row.job.prompt + len(row.tokens):
                row.tokens.append(now)
        for row in [row for row in rows if len(row.tokens) == row.job.output]:
            found[row.job.number] = row.tokens
            rows.remove(row)
    return found


def _iterate(rows: list[Row], profile: NodeProfile) -> float:
    """Computes one token of each row that decodes and chunks of prompts; returns how long it takes."""
    model = profile.performance
    decoding = [row for row in rows if row.tokens]
    left = max(profile.chunk_tokens - len(decoding), 1)
    chunks = []
    for row in rows:
        if not row.tokens and left:
            length = min(row.job.prompt - row.computed, left)
            chunks.append((row, length))
            left -= length
    seconds = 0.0
    if decoding:
        padded = model.decode.padded_rank
        ranks = [row.job.rank and max(row.job.rank, padded) for row in decoding]
        apart = {row.job.digest: rank for row, rank in zip(decoding, ranks, strict=True) if row.job.digest}
        term = {
            "max_rank": len(ranks) * max(ranks),
            "request_ranks": sum(ranks),
            "adapter_ranks": sum(apart.values()),
        }[model.decode.rank_term]
        seconds += model.decode.base + model.decode.per_row * max(0, len(ranks) - model.decode.flat_rows)
        seconds += model.decode.per_rank * term
        seconds += model.decode.per_context * sum(row.computed for row in decoding)
    if chunks:
        seconds += model.prefill.base
        if decoding and profile.one_pass:
            seconds -= min(model.prefill.base, model.decode.base)
        for row, length in chunks:
            end = row.computed + length
            seconds += model.prefill.per_token * length + model.prefill.per_token2 * (end**2 - row.computed**2)
            seconds += (
                model.prefill.per_token_rank * length * (row.job.rank and max(row.job.rank, model.prefill.padded_rank))
            )
            row.computed = end
    for row in decoding:
        row.computed += 1
    return seconds


def _kv(job: Job, profile: NodeProfile) -> int:
    return -(-(job.prompt + job.max_tokens) // profile.block_tokens) * profile.block_tokens


def _reserved(rows: list[Row], profile: NodeProfile) -> int:
    return sum(_kv(row.job, profile) for row in rows)
