"""`sgmv` against float64, on Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace

from kernels.launch import launch_for
from kernels.sgmv import sgmv
from tests.kernels.drawn import DEVICE, POPULAR, SMALL, cases, check, popular_case
from tests.support.draws import draws
from tests.support.kernel_cases import Case, draw_case


def run(ys: list[torch.Tensor], case: Case) -> None:
    sgmv(case.call(ys), SMALL)


@pytest.mark.parametrize(("popularity", "dtype"), POPULAR)
def test_popularity(popularity: str, dtype: torch.dtype) -> None:
    """Those that are called alike make a segment of more than a tile."""
    check(run, popular_case(popularity, dtype, 3, 6, 40, [33, 1]))


@settings(max_examples=draws(3))
@given(case=cases(largest_rank=40, longest=20, widest=40))
def test_drawn(case: Case) -> None:
    check(run, case)


@pytest.mark.slow
@given(case=cases(largest_rank=130, longest=300, widest=300))
def test_drawn_long(case: Case) -> None:
    check(run, case)


def test_empty_and_one_token_segments() -> None:
    segments = [(0, 0), (1, 1), (-1, 0), (0, 33), (1, 0), (2, 1), (1, 0)]
    check(run, draw_case([5, 20, 7], segments, 40, [24, 24], torch.float32, device=DEVICE))


def test_more_tiles_than_segments_and_the_reverse() -> None:
    check(run, draw_case([5], [(0, 40)], 40, [33, 20, 1], torch.float32, device=DEVICE))
    check(run, draw_case([5, 6], [(i % 2, 1) for i in range(9)], 40, [24], torch.float32, device=DEVICE))


def test_device_default_tiles() -> None:
    case = draw_case([33, 8], [(0, 66), (-1, 3), (1, 5)], 100, [150, 60], torch.bfloat16, device=DEVICE)
    how = launch_for("sgmv", case.x.device)
    check(lambda ys, c: sgmv(c.call(ys), replace(how, splits=2)), case)
    check(lambda ys, c: sgmv(c.call(ys)), case)
