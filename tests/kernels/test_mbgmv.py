"""`mbgmv` against float64, on Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings

from kernels.decode import mbgmv
from kernels.sgmv import sgmv
from kernels.view import KernelArgumentError
from tests.kernels.drawn import DEVICE, POPULAR, SMALL, TOLERANCE, cases, check, popular_case
from tests.support.draws import draws
from tests.support.kernel_cases import Case, draw_case, relative_error


def run(ys: list[torch.Tensor], case: Case) -> None:
    mbgmv(case.call(ys), SMALL)


@pytest.mark.parametrize(("popularity", "dtype"), POPULAR)
def test_popularity(popularity: str, dtype: torch.dtype) -> None:
    check(run, popular_case(popularity, dtype, 5, 1, 40, [33, 20, 1]))


@settings(max_examples=draws(4))
@given(case=cases(largest_rank=40, longest=4, widest=40))
def test_drawn(case: Case) -> None:
    check(run, case)


@pytest.mark.slow
@given(case=cases(largest_rank=130, longest=20, widest=300))
def test_drawn_long(case: Case) -> None:
    check(run, case)


@pytest.mark.parametrize("rank", [1, 511, 512])
def test_extreme_ranks(rank: int) -> None:
    check(run, draw_case([rank], [(0, 1)], 40, [24], torch.float32, device=DEVICE))


def test_device_default_tiles() -> None:
    case = draw_case([17, 8], [(0, 1), (-1, 1), (1, 18)], 200, [150, 60], torch.bfloat16, device=DEVICE)
    check(lambda ys, c: mbgmv(c.call(ys)), case)


def test_nan_in_one_adapter_stays_in_its_rows() -> None:
    case = draw_case([5, 20], [(0, 2), (1, 2)], 40, [24, 30], torch.float32, device=DEVICE)
    clean = case.fresh()
    run(clean, case)
    row = int(case.view.row_offset[case.view.first[1, 0, 0]]) * case.view.unit
    case.view.pool[row] = torch.nan
    ys = case.fresh()
    run(ys, case)
    assert bool(ys[0][2:].isnan().all())
    assert torch.equal(ys[0][:2], clean[0][:2])
    assert torch.equal(ys[1], clean[1])


def test_refuses_what_it_cannot_take() -> None:
    case = draw_case([5], [(0, 2)], 40, [24], torch.float32, device=DEVICE)
    ys = case.fresh()
    with pytest.raises(KernelArgumentError, match=r"x is torch\.bfloat16"):
        mbgmv(case.call(ys, x=case.x.bfloat16()), SMALL)
    with pytest.raises(KernelArgumentError, match="2 outputs for 1 projections"):
        mbgmv(case.call([*ys, *ys]), SMALL)
    with pytest.raises(KernelArgumentError, match=r"seg_start must be i32\[2\]"):
        mbgmv(case.call(ys, seg_start=case.seg_start.long()), SMALL)
    with pytest.raises(KernelArgumentError, match=r"xa is \(1, 1, 2, 16\)"):
        mbgmv(case.call(ys, xa=case.xa[:1]), SMALL)
    with pytest.raises(KernelArgumentError, match="rows of stride 1"):
        mbgmv(case.call([ys[0].t().contiguous().t()]), SMALL)
    assert torch.equal(ys[0], case.ys[0])


@pytest.mark.parametrize("operation", [mbgmv, sgmv])
def test_refuses_ranks_that_the_scratch_would_cut(operation: Callable[..., None]) -> None:
    """Also where other ranks of the batch fit; one less is taken, and right."""
    case = draw_case([3, 33], [(0, 2), (1, 2)], 40, [24], torch.float32, device=DEVICE)
    ys = case.fresh()
    short = torch.full((*case.xa.shape[:3], 32), torch.nan, device=DEVICE)
    with pytest.raises(KernelArgumentError, match="largest rank is 33; the scratch xa has room for 32"):
        operation(case.call(ys, xa=short), SMALL)
    assert torch.equal(ys[0], case.ys[0])
    operation(case.call(ys, xa=case.xa[..., :33].contiguous()), SMALL)
    assert relative_error(ys, case) <= TOLERANCE[torch.float32]
