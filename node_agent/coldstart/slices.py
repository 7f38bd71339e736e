"""How the tokens of a handoff are cut among workers: in slices of c tokens each (Toppings, section 4.2), of all the
adapters that it is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import NamedTuple

ROUNDING = 1e-9
"""Relative, of sums of shares."""


class Segment(NamedTuple):
    """Tokens of one adapter, behind those of the segment before."""

    host_slot: int
    tokens: int
    slice_tokens: int
    """c: so many of them are work for one worker"""


def slices_wanted(segments: Sequence[Segment]) -> int:
    """Returns how many workers have their fill: one at least, and no more than there are tokens."""
    if len(segments) == 1:
        return -(-segments[0].tokens // segments[0].slice_tokens)
    return max(1, ceil(_work(segments) - ROUNDING))


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
        behind = round((ends[at] - i * share) * segments[at].slice_tokens)
        borders.add(first + segments[at].tokens - min(max(behind, 0), segments[at].tokens))
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
