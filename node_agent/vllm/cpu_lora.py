"""LoRA products on a CPU, in the place of vLLM's own functions of these names.

vLLM 0.32 marks rows of the base model by the index -1, which its functions take as the last slot (vllm#48421). These
leave such rows without an adapter. They compute the rows of each adapter in one product, where vLLM's copy the
adapter's weights for every row.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = -1
"""Index of rows that use no adapter."""


def bgmv_shrink(
    inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, scaling: float = 1.0
) -> None:
    """Writes each row times its adapter's A matrix."""
    outputs = _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    output_tensor[:, : outputs.shape[1]] = scaling * outputs


def bgmv_expand(
    inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, add_inputs: bool = True
) -> None:
    """Writes, or adds, each row times its adapter's B matrix."""
    outputs = _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    width = min(outputs.shape[1], output_tensor.shape[1])  # padded differently
    _write(output_tensor[:, :width], outputs[:, :width], add_inputs)


def bgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Same as `bgmv_expand`, for some columns of the output."""
    outputs = _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    _write(output_tensor[:, slice_offset : slice_offset + slice_size], outputs, add_inputs)


def _write(target: Tensor, outputs: Tensor, adds: bool) -> None:
    if adds:
        target += outputs
    else:
        target[:] = outputs


def _products(inputs: Tensor, weights: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [rows, d_out] of inputs [rows, d_in]: each row times its adapter's matrix; 0 for rows of the base model.
    `weights`: [slots, d_out, d_in], or the same with a dimension of 1 behind the first."""
    if weights.dim() == 4:
        weights = weights.squeeze(1)
    inputs = inputs.to(dtype)
    present: list[int] = torch.unique(indices).tolist()
    if len(present) == 1 and present[0] != BASE:
        return inputs @ weights[present[0]].to(dtype).T
    outputs = inputs.new_zeros((len(indices), weights.shape[1]))
    for index in present:
        if index != BASE:
            rows = (indices == index).nonzero().squeeze(1)
            outputs[rows] = inputs[rows] @ weights[index].to(dtype).T
    return outputs
