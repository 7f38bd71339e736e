"""What the tests of the Triton operations share: drawn calls, and one check of a result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st

from kernels.launch import Launch
from tests.support.kernel_cases import POPULARITY, Case, draw_case, draw_slots, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SMALL = Launch(tokens=16, ranks=16, shrink_width=32, expand_width=32, splits=2, rank_programs=2)
"""Tiles so small that small shapes have several of each kind. Where they are interpreted, a program takes as long
whatever its tile is: what a test takes goes by how many programs it has."""
POPULAR = [
    pytest.param(popularity, dtype, marks=() if number == turn % len(TOLERANCE) else pytest.mark.slow)
    for turn, popularity in enumerate(POPULARITY)
    for number, dtype in enumerate(TOLERANCE)
]
"""(popularity, dtype): every one of each. All pairs in `make test-long`."""

Operation = Callable[[list[torch.Tensor], Case], None]


@st.composite
def cases(draw: st.DrawFn, largest_rank: int, longest: int, widest: int) -> Case:
    """Any mix of ranks (0 too), segments (empty, of one token, base) and widths."""
    ranks = draw(st.lists(st.integers(0, largest_rank), min_size=1, max_size=4))
    segments = draw(
        st.lists(st.tuples(st.integers(-1, len(ranks) - 1), st.integers(0, longest)), min_size=1, max_size=5)
    )
    widths = draw(st.lists(st.integers(1, widest), min_size=1, max_size=3))
    return draw_case(
        ranks,
        segments,
        draw(st.integers(1, widest)),
        widths,
        draw(st.sampled_from(list(TOLERANCE))),
        seed=draw(st.integers(0, 1000)),
        scattered=draw(st.booleans()),
        device=DEVICE,
    )


def popular_case(popularity: str, dtype: torch.dtype, requests: int, length: int, d_in: int, widths: list[int]) -> Case:
    """`requests` rows of `length` tokens over adapters of mixed ranks, one base row before them and one after."""
    assert popularity in POPULARITY
    ranks = [8, 3, 33, 16, 1]
    slots = draw_slots(popularity, requests, len(ranks), torch.Generator().manual_seed(7))
    segments = [(-1, length), *((slot, length) for slot in slots), (-1, length)]
    merged: list[tuple[int, int]] = []
    for slot, tokens in segments:
        if merged and merged[-1][0] == slot:
            merged[-1] = (slot, merged[-1][1] + tokens)
        else:
            merged.append((slot, tokens))
    return draw_case(ranks, merged, d_in, widths, dtype, seed=requests, device=DEVICE)


def check(operation: Operation, case: Case) -> None:
    """Right to the dtype's tolerance, nothing else written, and bit-equal when repeated over another scratch."""
    ys = case.fresh()
    operation(ys, case)
    assert relative_error(ys, case) <= TOLERANCE[case.x.dtype]
    again = case.fresh()
    case.xa.fill_(torch.inf)
    operation(again, case)
    for first, second in zip(ys, again, strict=True):
        assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
