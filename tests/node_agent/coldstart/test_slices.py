"""How tokens are cut among workers, against a count of every token's share of a worker's fill."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node_agent.coldstart.slices import (
    MAX_SPLIT_TOKENS,
    MIN_SHARE,
    Segment,
    by_projection,
    cut,
    cut_columns,
    cut_rows,
    slices_wanted,
    weight_shares,
    within,
)

SEGMENTS = st.lists(
    st.builds(Segment, st.integers(0, 9), st.integers(1, 40), st.integers(1, 60) | st.just(1 << 50)),
    min_size=1,
    max_size=16,
)


@given(SEGMENTS, st.integers(1, 12))
def test_slices_are_of_equal_work(segments: list[Segment], workers: int) -> None:
    shares = [Fraction(1, one.slice_tokens) for one in segments for _ in range(one.tokens)]
    wanted = slices_wanted(segments)
    assert 1 <= wanted <= len(shares)
    assert wanted - 1 < sum(shares) * (1 + Fraction(1, 10**6)) and sum(shares) <= wanted + Fraction(1, 10**6)
    slices = cut(segments, workers)
    assert [slices[0][0], slices[-1][1]] == [0, len(shares)] and 1 <= len(slices) <= workers
    assert all(before[1] == after[0] for before, after in pairwise(slices))
    for begin, end in slices:
        assert begin < end
        assert sum(shares[begin:end]) <= sum(shares) / workers + max(shares) * (1 + Fraction(1, 10**6))


@given(st.integers(1, 200), st.integers(1, 200))
def test_one_adapter_has_ceil_of_tokens_over_c_slices(tokens: int, slice_tokens: int) -> None:
    """As Toppings, section 4.2, has it, and their lengths differ by one token at most."""
    segments = [Segment(0, tokens, slice_tokens)]
    wanted = slices_wanted(segments)
    assert wanted == -(-tokens // slice_tokens)
    lengths = [end - begin for begin, end in cut(segments, wanted)]
    assert len(lengths) == wanted and max(lengths) - min(lengths) <= 1


@given(SEGMENTS, st.integers(0, 700), st.integers(0, 700))
def test_whose_the_tokens_of_a_slice_are(segments: list[Segment], one: int, other: int) -> None:
    owners = [segment.host_slot for segment in segments for _ in range(segment.tokens)]
    begin, end = sorted((min(one, len(owners)), min(other, len(owners))))
    ends, at = [], 0
    for segment in segments:
        at += segment.tokens
        ends.append((segment.host_slot, at))
    found = list(within(ends, begin, end))
    assert [slot for slot, low, high in found for _ in range(low, high)] == owners[begin:end]
    assert [low for _, low, _ in found] == [begin, *(high for _, _, high in found[:-1])][: len(found)]


PROJECTIONS = st.lists(st.tuples(st.integers(1, 900), st.integers(0, 512)), min_size=1, max_size=3)


@given(PROJECTIONS, st.integers(1, 20))
def test_every_row_and_column_is_in_one_share(projections: list[tuple[int, int]], shares: int) -> None:
    """And as many elements as in any other share, but for what borders allow."""
    widths, ranks = ([one[i] for one in projections] for i in (0, 1))
    rows = [row for i in range(shares) for row in listed(cut_rows(ranks, i, shares), ranks)]
    assert rows == [(p, row) for p, rank in enumerate(ranks) for row in range(rank)]
    sizes = [len(listed(cut_rows(ranks, i, shares), ranks)) for i in range(shares)]
    assert max(sizes) - min(sizes) <= 1
    parts = [listed(cut_columns(widths, ranks, i, shares, 32), widths) for i in range(shares)]
    assert [column for part in parts for column in part] == [(p, c) for p, n in enumerate(widths) for c in range(n)]
    for part in parts[1:]:
        assert not part or part[0][1] % 32 == 0
    work, most = sum(width * rank for width, rank in projections), 32 * max(ranks)
    assert all(sum(ranks[p] for p, _ in part) <= work / shares + most for part in parts)


def listed(cut_out: tuple[int, int], sizes: list[int]) -> list[tuple[int, int]]:
    return [(p, i) for p, (low, high) in enumerate(by_projection(*cut_out, sizes)) for i in range(low, high)]


def test_weights_are_split_where_tokens_are_few() -> None:
    row = Segment(0, 1, 1, 8 * MIN_SHARE)
    assert [weight_shares([row], workers) for workers in (0, 1, 2, 6, 14)] == [0, 0, 2, 6, 8]
    assert weight_shares([row] * 2, 14) == 14, "what there is of several adapters counts together"
    assert weight_shares([row._replace(elements=0)], 14) == 0
    assert weight_shares([row._replace(elements=2 * MIN_SHARE - 1)], 14) == 0, "not worth a second worker"
    assert weight_shares([row._replace(tokens=14)], 14) == 0, "a slice for each"
    assert weight_shares([row._replace(tokens=9)], 14) == 0, "more slices than shares"
    assert weight_shares([row._replace(tokens=8)], 14) == 8
    most = row._replace(tokens=MAX_SPLIT_TOKENS, slice_tokens=MAX_SPLIT_TOKENS)
    assert weight_shares([most], 14) == 8 and weight_shares([most, row], 14) == 0
