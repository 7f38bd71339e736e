"""y = x W^T + b with W laid out once for the processor, where that pays."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear

ROWS_HINT = 8
"""The row count that oneDNN chooses its layout for: a decode batch. Others run with the same layout."""


class Linear(nn.Module):
    """A linear layer for inference.

    bf16 on a CPU: oneDNN would lay a plain weight out anew in every call, which at decode sizes is a large part of the
    call's time. So it is laid out once here, and the plain copy is dropped; the results have equal bits. Elsewhere it
    is torch's own linear.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.bias = bias
        self.packed = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 and _onednn_has_bf16()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT) if self.packed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., d_in] -> [..., d_out]"""
        if self.packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y
        return linear(x, self.weight, self.bias)


def _onednn_has_bf16() -> bool:
    return torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
