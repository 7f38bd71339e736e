"""What runs before and beside the GPU's timings, on Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import check
from benchmarks.gpu.check import WrongResult, check_operations, draw_cases
from benchmarks.kernels.tune import tune, with_device
from kernels.decode import mbgmv
from kernels.launch import OPERATIONS, TABLE, Launch, default_launch, read_table
from kernels.view import LoraCall
from tests.benchmarks.studies import run_study
from tests.kernels.drawn import DEVICE
from tests.support.kernel_cases import draw_case

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("quick_interpreter")


def test_every_operation_is_checked() -> None:
    rows = check_operations(draw_cases(2, 1, DEVICE, widest=40, largest_rank=9), 300)
    assert {row["operation"] for row in rows} == set(OPERATIONS)
    assert sum(row["calls"] for row in rows) == 6
    assert all(0 <= row["worst_error"] <= 1e-2 for row in rows)
    assert any(row["worst_error"] > 0 for row in rows)


def half_a_scale(call: LoraCall, sizes: Launch) -> None:
    before = [y.clone() for y in call.ys]
    mbgmv(call, sizes)
    for y, old in zip(call.ys, before, strict=True):
        y.sub_((y - old) / 2)


def write_elsewhere(call: LoraCall, sizes: Launch) -> None:
    mbgmv(call, sizes)
    call.ys[0].nan_to_num_(0.0)


@pytest.mark.parametrize("wrong", [half_a_scale, write_elsewhere])
def test_a_wrong_operation_ends_the_check(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., None]) -> None:
    case = draw_case([5], [(-1, 1), (0, 1)], 20, [12], torch.float32, device=DEVICE)
    assert check_operations(iter([case]), 0)
    monkeypatch.setitem(check.OPERATIONS, "mbgmv", wrong)
    with pytest.raises(WrongResult, match=r"mbgmv in torch.float32 .* ranks \[5\], slots \[-1, 0\]"):
        check_operations(iter([case]), 0)


def test_tuning_keeps_the_fastest_that_runs() -> None:
    """Times are given: fewer splits are slower, a split of 8 needs too much; stages make no difference."""

    def measure(call: Callable[[], object]) -> float:
        assert isinstance(call, partial)
        call()
        if call.keywords["sizes"].splits == 8:
            raise OutOfResources(2, 1, "shared memory")
        return 1.0 / float(call.keywords["sizes"].splits)

    case = draw_case([5, 3], [(0, 1), (1, 1)], 20, [12], torch.float32, device=DEVICE)
    best, ratio = tune("mbgmv", [case], {"splits": (2, 6, 8), "stages": (1,)}, measure, seconds=60)
    default = default_launch("mbgmv")
    assert (best.splits, best.stages) == (6, default.stages)
    assert ratio == pytest.approx(default.splits / 6)


def test_a_tuned_device_is_added_to_the_table() -> None:
    operations = {name: default_launch(name) for name in OPERATIONS}
    text = with_device(TABLE.read_bytes(), "Some GPU", "today", operations)
    assert read_table(text)["Some GPU"].operations == operations
    assert set(read_table(text)) == {*read_table(TABLE.read_bytes()), "Some GPU"}
    with pytest.raises(ValueError, match="operations must be"):
        with_device(TABLE.read_bytes(), "Some GPU", "today", {"mbgmv": default_launch("mbgmv")})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["gpu.suite", "kernels.tune", "gpu.ttft"])
def test_without_a_gpu_it_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^no GPU is here"):
        run_study(monkeypatch, name)
