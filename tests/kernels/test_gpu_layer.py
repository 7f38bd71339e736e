"""Norms, rotary embedding with the cache's writes, and SiLU, against float64 and Hugging Face, in Triton's interpreter
where there is no GPU, and in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from kernels.decoder import Heads, PagedCache
from kernels.gpu_ops import LayerOperations, Rotary
from kernels.gpu_reference import TorchOperations
from kernels.gpu_triton import TritonOperations
from kernels.view import KernelArgumentError
from tests.kernels.drawn import DEVICE
from tests.kernels.paged import ROUNDING, drawn_heads
from tests.support.draws import draws

BOTH = [TritonOperations(), TorchOperations()]
dtypes = st.sampled_from(list(ROUNDING))
SCALED = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
"""As Llama 3.1 scales, over so short a context that most frequencies are scaled."""


def close(got: torch.Tensor, want: torch.Tensor, roundings: int, factor: float) -> None:
    """A hundredth more than so many roundings: they multiply, and sums are in fp32. What is rounded first is multiplied
    by at most `factor`; fp16 has fewer digits below its least normal number, and so a fixed error there."""
    allowed = 1.01 * roundings * ROUNDING[got.dtype] + 2e-6
    least = 2.0**-24 * (1 + factor) if got.dtype is torch.float16 else 1e-30
    torch.testing.assert_close(got.double(), want.double(), rtol=allowed, atol=least)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


@pytest.mark.parametrize("operations", BOTH)
@settings(max_examples=draws(10))
@given(
    dtype=dtypes, rows=st.integers(0, 3), width=st.integers(1, 300), beside=st.integers(0, 9), seed=st.integers(0, 99)
)
def test_add_rms_norm(
    operations: LayerOperations, dtype: torch.dtype, rows: int, width: int, beside: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, residual, weight = (
        draw(rows, width + beside, dtype=dtype)[:, :width], draw(rows, width, dtype=dtype), draw(width, dtype=dtype)
    )  # fmt: skip
    for before in (residual, None):
        given_x, out = x.clone(), torch.full((rows, width), torch.nan, dtype=dtype, device=DEVICE)
        summed = x if before is None else before + x
        kept = None if before is None else before.clone()
        operations.add_rms_norm(x, weight, 1e-5, out=out, residual=kept)
        wide = summed.double()
        close(out, weight.double() * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5), 2, 9)
        assert torch.equal(x, given_x) and (kept is None or torch.equal(kept, summed))


@pytest.mark.parametrize("operations", BOTH)
@settings(max_examples=draws(6))
@given(dtype=dtypes, rows=st.integers(0, 3), width=st.integers(1, 1200), scale=st.floats(-3, 1.9))
def test_silu_mul(operations: LayerOperations, dtype: torch.dtype, rows: int, width: int, scale: float) -> None:
    torch.manual_seed(width)
    x, out = draw(rows, 2 * width, dtype=dtype) * 10**scale, torch.empty(rows, width, dtype=dtype, device=DEVICE)
    operations.silu_mul(x, out=out)
    gate, up = x[:, :width].double(), x[:, width:].double()
    close(out, gate * gate.sigmoid() * up, 2, 9 * 10**scale)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy computes in the interpreter
def test_bad_numbers_stay_bad_in_their_row() -> None:
    operations = TritonOperations()
    for bad in (torch.nan, torch.inf):
        x = draw(3, 20, dtype=torch.bfloat16)
        found = []
        for value in (x[1, 5].item(), bad):
            x[1, 5] = value
            normed, gated = torch.empty_like(x), torch.empty_like(x[:, :10])
            operations.add_rms_norm(x, torch.ones_like(x[0]), 1e-5, out=normed, residual=None)
            operations.silu_mul(x, out=gated)
            found.append((normed, gated))
        for clean, spoilt in zip(*found, strict=True):
            assert torch.equal(clean[[0, 2]], spoilt[[0, 2]]) and not bool(spoilt[1].isfinite().all())


def rotary_embedding(head_dim: int, rope: dict[str, object]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters=rope,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("operations", BOTH)
@settings(max_examples=draws(10))
@given(
    dtype=dtypes, tokens=st.integers(0, 3), heads=drawn_heads(), normed=st.booleans(), scaled=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_rotate_and_store(
    operations: LayerOperations,
    dtype: torch.dtype,
    tokens: int,
    heads: Heads,
    normed: bool,
    scaled: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    h, kv, dim = heads.heads, heads.kv_heads, heads.head_dim
    if normed:
        heads = replace(heads, norms=(draw(dim, dtype=dtype), draw(dim, dtype=dtype)), norm_eps=1e-5)
    qkv = draw(tokens, (h + 2 * kv) * dim, dtype=dtype)
    positions = torch.randint(0, 400, (tokens,), device=DEVICE)
    slots = 1 + torch.randperm(11, device=DEVICE)[:tokens]
    slots[2:] = -1
    cache = PagedCache(heads, draw(12, kv, dim, dtype=dtype), draw(12, kv, dim, dtype=dtype), 4)
    keys, values = cache.keys.clone(), cache.values.clone()
    rope = SCALED if scaled else {"rope_type": "default", "rope_theta": 10000.0}
    cos, sin = (part[0] for part in rotary_embedding(dim, rope)(qkv, torch.arange(400, device=DEVICE)[None]))
    rotary = Rotary(cos[:, : dim // 2].contiguous(), sin[:, : dim // 2].contiguous())
    before = qkv.clone()
    operations.rotate_and_store(qkv, rotary, cache, positions=positions, slots=slots)

    q, k, v = before.view(tokens, h + 2 * kv, dim).split([h, kv, kv], dim=1)
    if heads.norms is not None:
        for_q, for_k = (LlamaRMSNorm(dim, heads.norm_eps) for _ in range(2))
        for_q.weight.data, for_k.weight.data = heads.norms
        q, k = for_q(q).detach(), for_k(k).detach()
    q, k = apply_rotary_pos_emb(q, k, cos[positions], sin[positions])
    # a rotated head is a difference: what may differ goes by the head's size. Without norms nothing differs.
    sizes = [float(part.abs().max()) if part.numel() else 0.0 for part in (q, k)]
    least = [(8 * ROUNDING[dtype] + 1e-6) * size if normed else 0.0 for size in sizes]
    torch.testing.assert_close(qkv.view(tokens, h + 2 * kv, dim)[:, :h], q, rtol=0, atol=least[0])
    assert torch.equal(qkv[:, h * dim :], before[:, h * dim :])
    written = slots[slots >= 0]
    torch.testing.assert_close(cache.keys[written], k[: len(written)], rtol=0, atol=least[1])
    assert torch.equal(cache.values[written], v[: len(written)])
    cache.keys[written], cache.values[written] = keys[written], values[written]
    assert torch.equal(cache.keys, keys) and torch.equal(cache.values, values)


@pytest.mark.parametrize("operations", BOTH)
def test_refuses_other_layouts(operations: LayerOperations) -> None:
    x, weight = torch.zeros(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(KernelArgumentError, match=r"x must be \[T, 9\]"):
        operations.add_rms_norm(x, torch.ones(9, device=DEVICE), 1e-5, out=x, residual=None)
    with pytest.raises(KernelArgumentError, match=r"residual is torch\.float64"):
        operations.add_rms_norm(x, weight, 1e-5, out=x, residual=x.double())
    with pytest.raises(KernelArgumentError, match="rows of stride 1"):
        operations.add_rms_norm(x.t(), torch.ones(2, device=DEVICE), 1e-5, out=x, residual=None)
    with pytest.raises(KernelArgumentError, match=r"gate_up must be \[T, 16\]"):
        operations.silu_mul(x, out=x)
    with pytest.raises(KernelArgumentError, match=r"gate_up is torch\.float64"):
        operations.silu_mul(x.double(), out=x[:, :4])
    cache = PagedCache(Heads(1, 1, 4, 1.0), x.view(4, 1, 4), x.view(4, 1, 4), 2)
    rotary = Rotary(x.view(8, 2), x.view(8, 2))
    token = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(KernelArgumentError, match=r"qkv must be \[T, 12\]"):
        operations.rotate_and_store(x, rotary, cache, positions=token, slots=token)
    with pytest.raises(KernelArgumentError, match=r"slots is torch\.int32"):
        operations.rotate_and_store(
            torch.zeros(2, 12, device=DEVICE), rotary, cache, positions=token, slots=token.int()
        )
