"""Passes that a sweep measures: batch sizes, mixes of ranks, context lengths and prompt lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

RANKS = (8, 16, 32, 64, 128)
LONG_ROWS = 4
"""Number of rows that share half of the cache, so that they can have long contexts."""


@dataclass(frozen=True)
class CaseRow:
    """Row of a pass: it computes `length` tokens after `context` tokens in the cache. `adapter` is an index into the
    synthetic adapters; -1 for the base model."""

    context: int
    length: int
    adapter: int


@dataclass(frozen=True)
class Case:
    """Pass to measure."""

    decode: bool
    """whether each row is a decode step of one token; otherwise each is a prompt chunk"""
    rows: tuple[CaseRow, ...]


@dataclass(frozen=True)
class Effort:
    """Extent of a sweep: row counts, ranks, prompt lengths and repetitions."""

    rows: tuple[int, ...]
    ranks: tuple[int, ...]
    draws: int
    """number of random draws of contexts for each number of rows and mix of ranks"""
    tokens: tuple[int, ...]
    rounds: int
    """number of rounds; the first is a warm-up"""
    cache: int
    """maximum tokens in the cache, over all rows"""


IDLE = Effort((1, 2, 4, 8, 16, 64), (8, 32, 64), 1, (16, 48, 128, 256), 5, 2048)
LONG = Effort(
    (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256), RANKS, 2, (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 2048),
    6, 16384,
)  # fmt: skip
"""Extent of the sweep of `garnish profile`. Row counts above `max_rows` and prompts above `chunk_tokens` are skipped;
the defaults on a CPU are 32 and 512."""


@dataclass(frozen=True)
class Bounds:
    """Limits of this node's sweep."""

    chunk_tokens: int
    contexts: tuple[int, ...]
    """number of tokens in each row's part of the cache, longest first"""
    ranks: tuple[int, ...]
    """ranks of the synthetic adapters"""


def row_contexts(effort: Effort, max_rows: int, max_context: int, cache_tokens: int, block_tokens: int) -> list[int]:
    """Returns the number of tokens in each row's part of the cache, longest first, in whole blocks.

    The first rows, at most LONG_ROWS, share half of the cache. The number of other rows is limited so that each gets at
    least a block.
    """
    tokens = min(effort.cache, cache_tokens)
    max_rows_cached = LONG_ROWS + tokens // 2 // block_tokens
    count = max((rows for rows in effort.rows if rows <= min(max_rows, max_rows_cached)), default=1)
    few = min(LONG_ROWS, -(-count // 2))
    shares = [tokens // 2 // few] * few
    if count > few:
        shares += [tokens // 2 // (count - few)] * (count - few)
    contexts = [min(share, max_context) // block_tokens * block_tokens for share in shares]
    return sorted((share for share in contexts if share), reverse=True)


def decode_cases(effort: Effort, bounds: Bounds, seed: int) -> list[Case]:
    """Returns decode passes for each number of rows and each mix of adapters, with alternately short and long random
    contexts.

    The mixes are: the base model alone; each rank, with one adapter per row and with one for all rows; all ranks mixed;
    and half of the rows without an adapter.
    """
    draw = random.Random(seed)
    cases = []
    for count in effort.rows:
        if count > len(bounds.contexts):
            continue
        for number, mix in enumerate(_mixes(effort, bounds.ranks)):
            for draw_number in range(effort.draws):
                adapters = [mix(i) for i in range(count)]
                share = draw.uniform(0.6, 1.0) if (number + draw_number) % 2 else draw.uniform(0.05, 0.4)
                contexts = [max(1, int(bounds.contexts[i] * share * draw.uniform(0.5, 1.0)) - 1) for i in range(count)]
                rows = (CaseRow(c, 1, a) for c, a in zip(contexts, adapters, strict=True))
                cases.append(Case(True, tuple(rows)))
    return cases


def prefill_cases(effort: Effort, bounds: Bounds) -> list[Case]:
    """Returns prompt passes for each length, without an adapter and with each rank. Each is one prompt, four prompts,
    or the end of a longer prompt."""
    cases = []
    longest = max(bounds.contexts, default=0)
    for tokens in effort.tokens:
        if tokens > bounds.chunk_tokens:
            continue
        adapters = _firsts(effort, bounds.ranks)
        for adapter in (-1, *adapters):
            if tokens <= longest:
                cases.append(Case(False, (CaseRow(0, tokens, adapter),)))
        few = min(LONG_ROWS, len(bounds.contexts))
        if few and tokens // few >= 4 and tokens // few <= bounds.contexts[few - 1]:
            mixed = [adapters[i % len(adapters)] if adapters else -1 for i in range(few)]
            cases.append(Case(False, tuple(CaseRow(0, tokens // few, adapter) for adapter in mixed)))
        if 2 * tokens <= longest:
            cases.append(Case(False, (CaseRow(longest - tokens, tokens, -1),)))
    return cases


def grid_cases(ranks: Sequence[int], bounds: Bounds, context: int) -> list[Case]:
    """Returns the grid of the paper (Toppings, figure 11): batches of 4, 8, 16 and 32 with equal ranks, and with
    alternating ranks."""
    cases = []
    for count in (4, 8, 16, 32):
        if count > len(bounds.contexts):
            continue
        contexts = [min(context, bounds.contexts[i] - 1) for i in range(count)]
        mixes = [_cycle(_of_rank(bounds.ranks, rank)) for rank in ranks]
        mixes.append(_in_turn(bounds.ranks, ranks))
        mixes += [_in_turn(bounds.ranks, pair) for pair in pairwise(ranks)]
        for mix in mixes:
            cases.append(Case(True, tuple(CaseRow(contexts[i], 1, mix(i)) for i in range(count))))
    return cases


Mix = Callable[[int], int]
"""Function that returns the index of a row's adapter, given the index of the row."""


def _mixes(effort: Effort, ranks: Sequence[int]) -> Iterator[Mix]:
    yield lambda _: -1
    for rank in effort.ranks:
        of_rank = _of_rank(ranks, rank)
        if of_rank:
            yield _cycle(of_rank)
            yield _cycle(of_rank[:1])
    mixed = _in_turn(ranks, effort.ranks)
    if ranks:
        yield mixed
        yield lambda i: mixed(i) if i % 2 else -1


def _cycle(adapters: Sequence[int]) -> Mix:
    return lambda i: adapters[i % len(adapters)] if adapters else -1


def _in_turn(lent: Sequence[int], ranks: Sequence[int]) -> Mix:
    """Returns a mix in which successive rows have different ranks in turn. Successive rows of a rank use successive
    adapters of that rank."""
    groups = [group for rank in ranks if (group := _of_rank(lent, rank))]
    return lambda i: groups[i % len(groups)][i // len(groups) % len(groups[i % len(groups)])] if groups else -1


def _of_rank(lent: Sequence[int], rank: int) -> list[int]:
    return [i for i, lent_rank in enumerate(lent) if lent_rank == rank]


def _firsts(effort: Effort, lent: Sequence[int]) -> list[int]:
    return [of_rank[0] for rank in effort.ranks if (of_rank := _of_rank(lent, rank))]
