"""Divides a handoff among workers. Its tokens, for all its adapters, are divided into slices of c tokens (Toppings
4.2). If there are too few tokens for all workers, the weights are divided instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

ROUNDING = 1e-9
"""Relative rounding tolerance for sums of shares."""
MAX_SPLIT_TOKENS = 256
"""Maximum tokens of a handoff with split weights; the shared memory has room for their x A^T."""
MIN_SHARE = 1 << 16
"""Minimum elements of A and B for each worker that shares the weights, since each additional worker costs the engine
about 5 us. Set by hand."""


class Segment(NamedTuple):
    """Consecutive tokens of one adapter in a handoff."""

    host_slot: int
    tokens: int
    slice_tokens: int
    """number of tokens of one worker's slice (c in Toppings 4.2)"""
    elements: int = 0
    """number of elements of A and B; 0: the weights are not split"""


def slices_wanted(segments: Sequence[Segment]) -> int:
    """Returns the number of workers that get a full slice; at least 1, at most the number of tokens."""
    if len(segments) == 1:
        return -(-segments[0].tokens // segments[0].slice_tokens)
    return max(1, ceil(_work(segments) - ROUNDING))


def weight_shares(segments: Sequence[Segment], workers: int) -> int:
    """Returns the number of workers that share the weights; 0 if the tokens are divided instead. `workers`: number of
    free workers.

    Tokens are divided if they suffice for all free workers, or for more workers than could usefully share the weights.
    """
    slices = slices_wanted(segments)
    shares = min(workers, sum(segment.elements for segment in segments) // MIN_SHARE)
    few = slices < workers and sum(segment.tokens for segment in segments) <= MAX_SPLIT_TOKENS
    return shares if few and shares >= max(2, slices) else 0


def cut_rows(ranks: Sequence[int], share: int, shares: int) -> tuple[int, int]:
    """Returns the rows (first, end) of A that belong to share number `share` of `shares` equal ones. Rows are numbered
    through the projections of the group."""
    return sum(ranks) * share // shares, sum(ranks) * (share + 1) // shares


def cut_columns(widths: Sequence[int], ranks: Sequence[int], share: int, shares: int, multiple: int) -> tuple[int, int]:
    """Returns the outputs (first, end) that belong to share number `share` of `shares`. Outputs are numbered through
    the projections of the group.

    An output costs as much as its projection's rank, and all shares cost about the same. Borders are multiples of
    `multiple` from a projection's first output. Outputs of rank 0 also belong to some share.
    """

    total = sum(width * rank for width, rank in zip(widths, ranks, strict=True))

    def border(at: int) -> int:
        remaining, first = total * at // shares, 0
        for width, rank in zip(widths, ranks, strict=True):
            if remaining < width * rank:
                return first + remaining // rank // multiple * multiple
            remaining, first = remaining - width * rank, first + width
        return first

    return border(share) if share else 0, border(share + 1)


def by_projection(begin: int, end: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns, for each projection, its part (first, end) of the range begin..end, in the projection's own numbering.
    `sizes`: number of rows or outputs of each projection."""
    firsts = accumulate(sizes, initial=0)
    return [
        (min(max(begin - first, 0), size), min(max(end - first, 0), size))
        for first, size in zip(firsts, sizes, strict=False)
    ]


def cut(segments: Sequence[Segment], count: int) -> list[tuple[int, int]]:
    """Returns at most `count` non-empty slices (first token, end) of about equal work. A token of a segment counts as 1
    / `slice_tokens` of a full slice."""
    share = _work(segments) / count
    borders = {0, sum(segment.tokens for segment in segments)}
    ends = list(accumulate(segment.tokens / segment.slice_tokens for segment in segments))
    at = first = 0
    for i in range(1, count):
        while ends[at] < i * share * (1 - ROUNDING):
            first += segments[at].tokens
            at += 1
        tokens = round((ends[at] - i * share) * segments[at].slice_tokens)
        borders.add(first + segments[at].tokens - min(max(tokens, 0), segments[at].tokens))
    return list(pairwise(sorted(borders)))


def within(segments: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (host slot, first token, end) of each segment's part of the tokens `begin` to `end`. `segments`: (host
    slot, end) of each, in order."""
    first = 0
    for host_slot, last in segments:
        low, high = max(first, begin), min(last, end)
        if low < high:
            yield host_slot, low, high
        first = last


def _work(segments: Sequence[Segment]) -> float:
    return sum(segment.tokens / segment.slice_tokens for segment in segments)
