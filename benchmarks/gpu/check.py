"""Every Triton operation against the float64 reference over drawn shapes, before anything is timed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernels.decode import bgmv, mbgmv
from kernels.launch import Launch, launch_for
from kernels.sgmv import sgmv
from tests.support.kernel_cases import Case, draw_case, relative_error

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest difference over the largest value"""
OPERATIONS: dict[str, Callable[..., None]] = {"bgmv": bgmv, "mbgmv": mbgmv, "sgmv": sgmv}


class WrongResult(RuntimeError):
    """An operation did not compute what the reference does: its times mean nothing."""


def draw_cases(count: int, seed: int, device: str, widest: int = 4200, largest_rank: int = 256) -> Iterator[Case]:
    """Ranks 0 to `largest_rank`, segments that are empty, base, of one token or many, widths of any remainder."""
    rng = random.Random(seed)
    for index in range(count):
        ranks = [rng.choice((0, 1, 5, 8, 16, 33, 64, 128, 256)) for _ in range(rng.randint(1, 6))]
        segments = [
            (rng.randrange(-1, len(ranks)), rng.choice((0, 1, 1, 1, 2, 17, 70))) for _ in range(rng.randint(1, 12))
        ]
        yield draw_case(
            [min(rank, largest_rank) for rank in ranks],
            segments,
            _draw_width(rng, widest),
            [_draw_width(rng, widest) for _ in range(rng.randint(1, 3))],
            rng.choice(list(TOLERANCE)),
            seed=seed + index,
            scattered=rng.random() < 0.5,
            device=device,
        )


def _draw_width(rng: random.Random, widest: int) -> int:
    """Draws a width, often a multiple of 16, which Triton compiles separately."""
    width = rng.randint(1, widest)
    return width if rng.random() < 0.3 else max(16, width // 16 * 16)


def scratch_for(case: Case, how: Launch) -> torch.Tensor:
    """f32, as the operations' docstrings want it."""
    return torch.full((how.splits, *case.xa.shape[1:]), torch.nan, device=case.x.device)


def error_of(name: str, case: Case, how: Launch) -> float:
    """Relative error of one call; inf when it wrote a row that it must not, or a second call differs in any bit."""
    scratch, results = scratch_for(case, how), []
    for _ in range(2):
        ys = case.fresh()
        OPERATIONS[name](case.call(ys, xa=scratch), how)
        results.append(ys)
        scratch.fill_(torch.inf)
    same = all(
        torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0)) for first, second in zip(*results, strict=True)
    )
    return relative_error(results[0], case) if same else torch.inf


def check_operations(cases: Iterator[Case], seconds: float) -> list[dict[str, Any]]:
    """Calls and worst error per operation and dtype, of the cases that `seconds` suffice for, one at least.

    Raises WrongResult at the first call that is wrong.
    """
    worst: dict[tuple[str, str], tuple[int, float]] = {}
    until = time.monotonic() + seconds
    for index, case in enumerate(cases):
        if index and time.monotonic() > until:
            break
        for name in OPERATIONS:
            error, dtype = error_of(name, case, launch_for(name, case.x.device)), case.x.dtype
            if not error <= TOLERANCE[dtype]:
                widths = [y.shape[1] for y in case.ys]
                raise WrongResult(
                    f"{name} in {dtype} is {error:.2e} off (allowed {TOLERANCE[dtype]:.0e}): ranks {case.ranks}, "
                    f"slots {case.seg_slot.tolist()}, starts {case.seg_start.tolist()}, {case.x.shape[1]} -> {widths}"
                )
            calls, before = worst.get((name, str(dtype)), (0, 0.0))
            worst[name, str(dtype)] = calls + 1, max(before, error)
    return [
        {"operation": name, "dtype": dtype[6:], "calls": calls, "worst_error": error}
        for (name, dtype), (calls, error) in sorted(worst.items())
    ]
