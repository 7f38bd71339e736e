"""Products of bf16 weights on a CPU, of several kinds. product_choice.py chooses among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from kernels.product import ProductOperator

ROWS_HINT = 8
"""Number of rows (a decode batch) for which oneDNN chooses the weight layout. The layout works for any number of
rows."""
PANEL = 1 << 20
"""Number of elements of a weight that are converted to fp32 at once: 4 MiB, which stay in the cache until they are
multiplied."""


@dataclass(frozen=True)
class Products:
    """Choice of the code for products of bf16 weights.

    packed          True: oneDNN multiplies, with weights that are reordered once
    few             else rows up to which the compiled product is used; more use fp32 products of widened weights
    wide_attention  True if attention of prompt chunks is computed in fp32
    operator        the compiled product; None without a compiler
    """

    packed: bool
    few: int
    wide_attention: bool
    operator: ProductOperator | None

    @property
    def name(self) -> str:
        """Name of the choice, which is part of the keys under which measured passes are stored."""
        return "oneDNN" if self.packed else f"bf16 to {self.few} rows, then fp32"


def can_pack() -> bool:
    """Returns True if oneDNN multiplies bf16 on this processor."""
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns a bf16 weight in oneDNN's layout, for `packed_product`.

    To reorder it in each call would take much of a decode step's time.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    return packed


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x W^T + b for bf16 x [..., d_in] and a weight in oneDNN's layout."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operator: ProductOperator | None
) -> torch.Tensor:
    """Returns x W^T + b for bf16 x [T, d_in] by the compiled operator, or by torch without one."""
    return linear(x, weight, bias) if operator is None else operator(x, weight, bias)


def widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x W^T + b for bf16 x [T, d_in] and W [d_out, d_in], by fp32 products with widened panels of W.

    From about eight rows on, widening takes a small part of the time. A stored fp32 copy would treble the memory of the
    weights.
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
    """Linear layer for inference; sums are fp32 and rounded once.

    `products` is the choice for bf16 weights on a CPU. Without it (fp32, fp16, GPUs) torch's linear is used. Packed
    weights replace the plain ones.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, products: Products | None = None) -> None:
        super().__init__()
        self.bias, self.products = bias, products
        self.weight = pack(weight) if products is not None and products.packed else weight.contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [..., d_out] for x [..., d_in]."""
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
