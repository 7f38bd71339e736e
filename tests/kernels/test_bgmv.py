"""`bgmv` against float64, on Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from kernels.decode import bgmv, mbgmv
from kernels.view import KernelArgumentError
from tests.kernels.drawn import DEVICE, POPULAR, SMALL, cases, check, popular_case
from tests.kernels.paged import counted_loads
from tests.support.draws import draws
from tests.support.kernel_cases import Case, draw_case


def run(ys: list[torch.Tensor], case: Case) -> None:
    bgmv(case.call(ys), SMALL)


@pytest.mark.parametrize(("popularity", "dtype"), POPULAR)
def test_popularity(popularity: str, dtype: torch.dtype) -> None:
    check(run, popular_case(popularity, dtype, 4, 1, 40, [33, 20, 1]))


@settings(max_examples=draws(4))
@given(case=cases(largest_rank=30, longest=3, widest=40))
def test_drawn(case: Case) -> None:
    check(run, case)


@pytest.mark.slow
@given(case=cases(largest_rank=130, longest=20, widest=300))
def test_drawn_long(case: Case) -> None:
    check(run, case)


def test_padding_changes_no_bit() -> None:
    """Zero rows add nothing: the padded result is the one of each adapter's own rank."""
    case = draw_case([3, 40], [(0, 1), (1, 1)], 40, [24], torch.bfloat16, device=DEVICE)
    padded, own = case.fresh(), case.fresh()
    run(padded, case)
    mbgmv(case.call(own), SMALL)
    assert torch.equal(padded[0], own[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="NOT RUN: what a kernel reads is seen in the interpreter alone")
def test_padding_is_paid_for() -> None:
    """Each segment reads as many rows as the largest rank in the batch, of A and B; `mbgmv` as many as its own rank.
    Slots that the batch has not are not padded to, and segments of the base or of rank 0 read nothing."""
    case = draw_case([3, 20, 90, 0], [(0, 1), (-1, 1), (1, 2), (3, 1)], 40, [24, 33], torch.float32, device=DEVICE)
    per_rank = 2 * 40 + 24 + 33
    for operation, ranks in ((bgmv, 20 + 20), (mbgmv, 3 + 20)):
        with counted_loads(case.view.pool) as count:
            operation(case.call(), SMALL)
        assert count[0] == ranks * per_rank


def test_refuses_a_rank_without_room() -> None:
    case = draw_case([5], [(0, 2)], 40, [24], torch.float32, device=DEVICE)
    ys = case.fresh()
    with pytest.raises(KernelArgumentError, match="largest rank is 17; the scratch xa has room for 16"):
        bgmv(case.call(ys, max_rank=17), SMALL)
    assert torch.equal(ys[0], case.ys[0])
