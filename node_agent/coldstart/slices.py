"""Cuts a handoff among workers: its tokens, of all the adapters that it is for, in slices of c each (Toppings,
section 4.2); or the weights, where the tokens are too few for all workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

ROUNDING = 1e-9
"""Relative, of sums of shares."""
MAX_SPLIT_TOKENS = 256
"""Tokens of a handoff whose weights are split, at most: the workers' memory has room for their x A^T."""
MIN_SHARE = 1 << 16
"""Elements of A and B that are worth one more worker, of whom each takes the engine some 5 us; set by hand."""


class Segment(NamedTuple):
    """Tokens of one adapter, behind those of the segment before."""

    host_slot: int
    tokens: int
    slice_tokens: int
    """c: number of tokens that are work for one worker"""
    elements: int = 0
    """elements of A and B; 0: the weights are not split"""


def slices_wanted(segments: Sequence[Segment]) -> int:
    """Returns how many workers have their fill: one at least, and no more than there are tokens."""
    if len(segments) == 1:
        return -(-segments[0].tokens // segments[0].slice_tokens)
    return max(1, ceil(_work(segments) - ROUNDING))


def weight_shares(segments: Sequence[Segment], workers: int) -> int:
    """Returns among how many of the free workers the weights are split; 0 where the tokens are cut instead. That is so
    where there are enough tokens for all workers, or for more workers than the weights are worth."""
    slices = slices_wanted(segments)
    shares = min(workers, sum(segment.elements for segment in segments) // MIN_SHARE)
    few = slices < workers and sum(segment.tokens for segment in segments) <= MAX_SPLIT_TOKENS
    return shares if few and shares >= max(2, slices) else 0


def cut_rows(ranks: Sequence[int], share: int, shares: int) -> tuple[int, int]:
    """Returns which rows of A (first, end) one of several equal shares has, counted through the projections."""
    return sum(ranks) * share // shares, sum(ranks) * (share + 1) // shares


def cut_columns(widths: Sequence[int], ranks: Sequence[int], share: int, shares: int, multiple: int) -> tuple[int, int]:
    """Returns which outputs (first, end) one of several shares has, counted through the projections. An output costs
    its projection's rank; shares cost as much each as borders allow that are multiples of `multiple` behind a
    projection's first output. Outputs of rank 0 are in some share, too."""

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
    """Returns the part (first, end) of begin..end that lies in each projection, as its own rows or outputs. `sizes`:
    how many each has."""
    firsts = accumulate(sizes, initial=0)
    return [
        (min(max(begin - first, 0), size), min(max(end - first, 0), size))
        for first, size in zip(firsts, sizes, strict=False)
    ]


def cut(segments: Sequence[Segment], count: int) -> list[tuple[int, int]]:
    """Returns the slices (first token, end), `count` at most, none of them empty: of as equal work as whole tokens
    allow, where a token of a segment is 1 / c of a worker's fill."""
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
    """Yields (host slot, first token, end) of what lies between the tokens `begin` and `end`. `segments`: (host slot,
    end) of each, in order."""
    first = 0
    for host_slot, last in segments:
        low, high = max(first, begin), min(last, end)
        if low < high:
            yield host_slot, low, high
        first = last


def _work(segments: Sequence[Segment]) -> float:
    return sum(segment.tokens / segment.slice_tokens for segment in segments)
