"""Cases that a measurement of vLLM runs: batches that grow row by row, and passes over prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from node_agent.performance.cases import LONG_ROWS, Effort, row_contexts

BLOCK_TOKENS = 16
"""Tokens to which a row's part of the cache is rounded."""
STEPS = 4
"""Number of decode steps that are timed at each size of a batch."""
SPARE_TOKENS = 24
"""Tokens that a row decodes for each size of its batch, at most: those timed, and those while other rows join."""


@dataclass(frozen=True)
class DummyAdapter:
    """Dummy adapter. Those of one rank differ by their number, from 0."""

    rank: int
    number: int


@dataclass(frozen=True)
class PlannedRow:
    """Request of a case: `length` prompt tokens are computed after `context` tokens that are in the cache."""

    context: int
    length: int
    adapter: DummyAdapter | None


@dataclass(frozen=True)
class GrowingBatch:
    """Batch whose decode steps are timed at each of its `sizes` (numbers of rows). A row's prompt is computed once,
    when the row joins."""

    rows: tuple[PlannedRow, ...]
    sizes: tuple[int, ...]

    @property
    def adapters(self) -> frozenset[DummyAdapter]:
        return _adapters(self.rows)


@dataclass(frozen=True)
class PromptPass:
    """Pass over prompts alone."""

    rows: tuple[PlannedRow, ...]

    @property
    def adapters(self) -> frozenset[DummyAdapter]:
        return _adapters(self.rows)


@dataclass(frozen=True)
class Room:
    """Limits of vLLM for a measurement."""

    max_rows: int
    max_context: int
    chunk_tokens: int
    """maximum prompt tokens of a pass"""
    kv_blocks: int
    block_tokens: int
    slots: int
    """number of adapters that may be loaded at once"""
    max_rank: int
    caches_prefixes: bool


def ranks_of(effort: Effort, max_rank: int) -> tuple[int, ...]:
    """Returns the ranks to measure: those of the effort that fit, and the largest that vLLM takes."""
    return tuple(sorted({rank for rank in effort.ranks if rank < max_rank} | {max_rank}))


def growing_batches(effort: Effort, room: Room, seed: int = 0) -> list[GrowingBatch]:
    """Returns a batch for each mix of adapters and each draw of contexts, alternately short and long.

    The mixes are: the base model alone; each rank, with as many adapters as there are slots and with one for all rows;
    all ranks in turn; and half of the rows without an adapter.
    """
    draw = random.Random(seed)
    batches = []
    for draw_number in range(effort.draws):
        for number, mix in enumerate(_mixes(ranks_of(effort, room.max_rank), room.slots)):
            contexts = _contexts(effort, room)
            share = draw.uniform(0.6, 1.0) if (number + draw_number) % 2 else draw.uniform(0.05, 0.4)
            drawn = [max(1, int(context * share * draw.uniform(0.5, 1.0))) for context in contexts]
            rows = tuple(PlannedRow(0, context, mix(at)) for at, context in enumerate(drawn))
            sizes = tuple(size for size in effort.rows if size <= len(rows))
            batches.append(GrowingBatch(rows[: max(sizes, default=0)], sizes))
    return [batch for batch in batches if batch.sizes]


def prompt_passes(effort: Effort, room: Room) -> list[PromptPass]:
    """Returns passes for each length, without an adapter and with each rank. Each is one prompt, some prompts, or the
    end of a longer prompt."""
    ranks = ranks_of(effort, room.max_rank) if room.slots else ()
    one_of_each = [DummyAdapter(rank, 0) for rank in ranks]
    passes = []
    longest = min(room.max_context - 1, room.kv_blocks // 2 * room.block_tokens, effort.cache // 2)
    for tokens in effort.tokens:
        if tokens > min(room.chunk_tokens, longest):
            continue
        for adapter in (None, *one_of_each):
            passes.append(PromptPass((PlannedRow(0, tokens, adapter),)))
        few = min(LONG_ROWS, room.max_rows)
        if few > 1 and tokens // few >= 4:
            mixed = [one_of_each[at % min(len(ranks), room.slots)] if ranks else None for at in range(few)]
            passes.append(PromptPass(tuple(PlannedRow(0, tokens // few, adapter) for adapter in mixed)))
        context = (longest - tokens) // room.block_tokens * room.block_tokens
        if room.caches_prefixes and context >= tokens:
            passes.append(PromptPass((PlannedRow(context, tokens, None),)))
    return passes


def _contexts(effort: Effort, room: Room) -> list[int]:
    """Returns the largest prompt of each row, longest first. The rows fit in the KV cache together with what they
    decode."""
    decoded = SPARE_TOKENS * len(effort.rows)
    longest = room.max_context - decoded
    if longest < 1:
        return []
    contexts = row_contexts(effort, room.max_rows, longest, room.kv_blocks * room.block_tokens, BLOCK_TOKENS) or [1]
    fitting, blocks = [], 0
    for context in contexts:
        blocks += -(-(context + decoded) // room.block_tokens)
        if blocks > room.kv_blocks:
            break
        fitting.append(context)
    return fitting


Mix = Callable[[int], DummyAdapter | None]
"""Function that returns a row's adapter, given the index of the row."""


def _mixes(ranks: Sequence[int], slots: int) -> Iterator[Mix]:
    yield lambda _: None
    if not slots:
        return
    for rank in ranks:
        for count in dict.fromkeys((slots, 1)):
            yield _in_turn([DummyAdapter(rank, number) for number in range(count)])
    mixed = _in_turn([DummyAdapter(ranks[-1 - at % len(ranks)], at // len(ranks)) for at in range(slots)])
    yield mixed
    yield lambda at: mixed(at // 2) if at % 2 else None


def _in_turn(adapters: Sequence[DummyAdapter]) -> Mix:
    return lambda at: adapters[at % len(adapters)]


def _adapters(rows: Sequence[PlannedRow]) -> frozenset[DummyAdapter]:
    return frozenset(row.adapter for row in rows if row.adapter is not None)
