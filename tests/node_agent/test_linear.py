"""The linear layer is as close to the exact product as torch's own, by whichever way it computes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from kernels.product import ProductOperator
from node_agent.runner.products import Linear, Products, can_pack

WAYS = {
    "torch": None,
    "packed": Products(True, 0, False, None),
    "few": Products(False, 100, False, ProductOperator()),
    "few by torch": Products(False, 100, False, None),
    "widened": Products(False, 0, False, None),
}


@pytest.mark.parametrize(("way", "dtype"), [*((way, torch.bfloat16) for way in WAYS), ("torch", torch.float32)])
@pytest.mark.parametrize(("d_in", "d_out"), [(64, 96), (172, 64), (33, 7), (1500, 1400)])
@pytest.mark.parametrize("rows", [1, 8, 65])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_torch(way: str, dtype: torch.dtype, d_in: int, d_out: int, rows: int, biased: bool) -> None:
    if way == "packed" and not can_pack():
        pytest.skip("oneDNN does not multiply bf16 on this processor")
    torch.manual_seed(d_in + rows)
    weight = torch.randn(d_out, d_in).to(dtype)
    bias = torch.randn(d_out).to(dtype) if biased else None
    x = torch.randn(1, rows, d_in).to(dtype)
    with torch.inference_mode():
        got, want = Linear(weight.clone(), bias, WAYS[way])(x), linear(x, weight, bias)
    assert got.dtype is dtype
    assert got.shape == want.shape
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    spread = float((want.double() - exact).abs().max())
    assert float((got.double() - exact).abs().max()) <= 2 * spread + 1e-6
