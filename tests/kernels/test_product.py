"""The compiled bf16 product against float64; equal bits whatever threads and rows are beside."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.product import ProductOperator
from kernels.view import KernelArgumentError

OPERATOR = ProductOperator()


def drawn(rows: int, d_in: int, d_out: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, d_in), (d_out, d_in), (d_out,)))
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.double() @ weight.double().t() + (0 if bias is None else bias.double())


@given(
    rows=st.integers(0, 21), d_in=st.integers(1, 300), d_out=st.integers(1, 200), seed=st.integers(0, 999),
    biased=st.booleans(), wider=st.integers(0, 5),
)  # fmt: skip
def test_drawn(rows: int, d_in: int, d_out: int, seed: int, biased: bool, wider: int) -> None:
    x, weight, bias = drawn(rows, d_in + wider, d_out, seed)
    x, weight = x[:, :d_in], weight[:, :d_in].contiguous()
    got = OPERATOR(x, weight, bias if biased else None)
    want = exact(x, weight, bias if biased else None)
    # one rounding to bf16 (2^-9 of the value), and fp32 sums
    assert bool(((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-5 * d_in).all())


def test_bits_depend_neither_on_threads_nor_on_other_rows() -> None:
    x, weight, bias = drawn(19, 577, 1537, 3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = OPERATOR(x, weight, bias)
        for other in (2, 3, 5):
            torch.set_num_threads(other)
            assert torch.equal(OPERATOR(x, weight, bias), together)
            for row in range(19):
                assert torch.equal(OPERATOR(x[row : row + 1], weight, bias), together[row : row + 1])
    finally:
        torch.set_num_threads(threads)


def test_nan_stays_in_its_row() -> None:
    x, weight, _ = drawn(5, 64, 96, 1)
    clean = OPERATOR(x, weight)
    x[2, 7] = torch.nan
    found = OPERATOR(x, weight)
    assert bool(found[2].isnan().all())
    keep = [0, 1, 3, 4]
    assert torch.equal(found[keep], clean[keep])


def test_refuses_what_it_cannot_take() -> None:
    x, weight, _ = drawn(2, 40, 24, 0)
    with pytest.raises(KernelArgumentError, match=r"x is torch\.float32"):
        OPERATOR(x.float(), weight)
    with pytest.raises(KernelArgumentError, match=r"\(2, 39\); bf16 \[T, 40\] is needed"):
        OPERATOR(x[:, :39], weight)
    with pytest.raises(KernelArgumentError, match="contiguous bf16 is needed"):
        OPERATOR(x[:, :24], weight.t())
