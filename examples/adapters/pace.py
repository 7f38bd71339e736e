"""How fast training goes on this host: the dtype to compute in, and how long it still takes."""

from __future__ import annotations

import time

import torch

ROUNDS = 3
ROWS = 256
"""Tokens of a small training batch."""
BF16_MUST_SAVE = 0.1
"""bf16 is chosen only if it saves this share of fp32's time: fp32 is the safe one, and short timings scatter."""


def fast_dtype(d_in: int, d_out: int) -> torch.dtype:
    """float32, or bfloat16 where this host's products of [ROWS, d_in] and [d_in, d_out], forward and backward, are
    faster in it: CPUs without bf16 units compute them many times as slowly. Takes well below a second."""
    product_s = dict.fromkeys((torch.float32, torch.bfloat16), float("inf"))
    for _ in range(ROUNDS):
        for dtype in product_s:
            product_s[dtype] = min(product_s[dtype], _product_s(d_in, d_out, dtype))
    saved = product_s[torch.float32] - product_s[torch.bfloat16]
    return torch.bfloat16 if saved > BF16_MUST_SAVE * product_s[torch.float32] else torch.float32


def _product_s(d_in: int, d_out: int, dtype: torch.dtype) -> float:
    """Seconds of one product with a frozen weight, as in the training of an adapter."""
    weight = torch.ones(d_out, d_in, dtype=dtype)
    rows = torch.ones(ROWS, d_in, dtype=dtype, requires_grad=True)
    start = time.perf_counter()
    (rows @ weight.T).sum().backward()
    return time.perf_counter() - start


def time_left(done: int, steps: int, seconds: float) -> str:
    """What is left when `done` of the steps took so many seconds, for people: "about 40 s left", "about 3 min left"."""
    left = seconds / done * (steps - done)
    return f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left"
