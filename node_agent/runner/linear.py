"""y = x W^T + b, computed as the node's choice of products says."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

from node_agent.runner.products import Products, few_rows, pack, packed_product, widened


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
