"""The prepared linear layer is as close to the exact product as torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from node_agent.runner.linear import Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("d_in", "d_out"), [(64, 96), (172, 64), (33, 7)])
@pytest.mark.parametrize("rows", [1, 8, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_torch(dtype: torch.dtype, d_in: int, d_out: int, rows: int, biased: bool) -> None:
    torch.manual_seed(d_in + rows)
    weight = torch.randn(d_out, d_in).to(dtype)
    bias = torch.randn(d_out).to(dtype) if biased else None
    x = torch.randn(1, rows, d_in).to(dtype)
    with torch.inference_mode():
        got, want = Linear(weight.clone(), bias)(x), linear(x, weight, bias)
    assert got.dtype is dtype
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    spread = float((want.double() - exact).abs().max())
    assert float((got.double() - exact).abs().max()) <= 2 * spread + 1e-6
