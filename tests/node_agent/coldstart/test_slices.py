"""How tokens are cut among workers, against a count of every token's share of a worker's fill."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node_agent.coldstart.slices import Segment, cut, slices_wanted, within

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
