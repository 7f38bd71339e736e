"""Products of bf16 weights on a CPU: the ways there are. product_choice.py chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from kernels.product import ProductOperator

ROWS_HINT = 8
"""The row count that oneDNN chooses its layout for: a decode batch. Others run with the same layout."""
PANEL = 1 << 20
"""Elements of a weight that are widened at a time: 4 MiB of fp32, which stay in a cache until they are multiplied."""


@dataclass(frozen=True)
class Products:
    """How products of bf16 weights are computed.

    packed          by oneDNN, over weights laid out once
    few             else: rows up to which the compiled product is used; more take fp32 products of widened weights
    wide_attention  whether the attention of prompt chunks is computed in fp32
    operator        the compiled product; None where there is no compiler
    """

    packed: bool
    few: int
    wide_attention: bool
    operator: ProductOperator | None

    @property
    def name(self) -> str:
        """Returns what a measurement of passes depends on."""
        return "oneDNN" if self.packed else f"bf16 to {self.few} rows, then fp32"


def can_pack() -> bool:
    """Whether oneDNN multiplies bf16 on this processor."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns a bf16 weight as oneDNN lays it out, for `packed_product`. Laid out in every call instead, it would cost
    a decode step much of its time."""
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return found


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x W^T + b for bf16 x [..., d_in]."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operator: ProductOperator | None
) -> torch.Tensor:
    """Returns x W^T + b for bf16 x [T, d_in]: compiled, or by torch where there is no operator."""
    return linear(x, weight, bias) if operator is None else operator(x, weight, bias)


def widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x W^T + b for bf16 x [T, d_in] by fp32 products over panels of W [d_out, d_in], each widened when it is
    needed.

    From some eight rows on that costs a small part of the product, so no fp32 copy is kept: it would treble the memory
    of the weights.
    """
    d_out, d_in = weight.shape
    wide = x.float()
    sums = wide.new_empty(x.shape[0], d_out)
    step = max(1, PANEL // d_in)
    panel = wide.new_empty(min(step, d_out), d_in)
    for begin in range(0, d_out, step):
        end = min(begin + step, d_out)
        part = panel[: end - begin]
        part.copy_(weight[begin:end])
        torch.mm(wide, part.t(), out=sums[:, begin:end])
    if bias is not None:
        sums += bias
    return sums.to(x.dtype)


class Linear(nn.Module):
    """A linear layer for inference; sums are fp32 and rounded once.

    `products` is the choice for bf16 weights on a CPU; without it (fp32, fp16, GPUs) this is torch's own linear. Packed
    weights take the place of the plain ones.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, products: Products | None = None) -> None:
        super().__init__()
        self.bias, self.products = bias, products
        self.weight = pack(weight) if products is not None and products.packed else weight.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d_in] -> [..., d_out]"""
        products = self.products
        if products is None:
            return linear(x, self.weight, self.bias)
        if products.packed:
            return packed_product(x, self.weight, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] <= products.few:
            y = few_rows(rows, self.weight, self.bias, products.operator)
        else:
            y = widened(rows, self.weight, self.bias)
        return y.view(*x.shape[:-1], -1)
