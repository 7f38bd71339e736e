"""LoRA products on a CPU against one row at a time."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node_agent.vllm.cpu_lora import BASE, bgmv_expand, bgmv_expand_slice, bgmv_shrink

SLOTS, D_IN, D_OUT = 3, 7, 5


def drawn(indices: list[int], wide: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(len(indices))
    weights = torch.randn(SLOTS, D_OUT, D_IN)
    return torch.randn(len(indices), D_IN), weights.unsqueeze(1) if wide else weights, torch.tensor(indices)


def by_rows(inputs: torch.Tensor, weights: torch.Tensor, indices: list[int]) -> torch.Tensor:
    found = torch.zeros(len(indices), D_OUT)
    for row, index in enumerate(indices):
        if index != BASE:
            found[row] = weights[index].reshape(D_OUT, D_IN) @ inputs[row]
    return found


INDICES = st.lists(st.integers(BASE, SLOTS - 1), min_size=1, max_size=9)


@given(INDICES, st.booleans(), st.booleans())
def test_each_row_gets_its_own_adapter_and_base_rows_none(indices: list[int], wide: bool, adds: bool) -> None:
    inputs, weights, numbers = drawn(indices, wide)
    right = by_rows(inputs, weights, indices)
    before = torch.randn(len(indices), D_OUT + 4)
    output = torch.zeros(len(indices), D_OUT)
    bgmv_shrink(inputs, weights, output, numbers, 0.5)
    assert torch.allclose(output, 0.5 * right, atol=1e-5)
    output = before.clone()
    bgmv_expand(inputs, weights, output, numbers, adds)
    assert torch.allclose(output[:, :D_OUT], right + adds * before[:, :D_OUT], atol=1e-5)
    assert torch.equal(output[:, D_OUT:], before[:, D_OUT:])
    output = before.clone()
    bgmv_expand_slice(inputs, weights, output, numbers, 3, D_OUT, adds)
    assert torch.allclose(output[:, 3 : 3 + D_OUT], right + adds * before[:, 3 : 3 + D_OUT], atol=1e-5)
    assert torch.equal(output[:, :3], before[:, :3]) and torch.equal(output[:, 3 + D_OUT :], before[:, 3 + D_OUT :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_the_outputs_type(dtype: torch.dtype) -> None:
    indices = [random.Random(3).randint(BASE, SLOTS - 1) for _ in range(12)]
    inputs, weights, numbers = drawn(indices, wide=True)
    inputs, weights = inputs.to(dtype), weights.to(dtype)
    output = torch.zeros(len(indices), D_OUT)
    bgmv_shrink(inputs, weights, output, numbers)
    assert torch.allclose(output, by_rows(inputs.float(), weights.float(), indices), atol=1e-5)
