"""A call of every Triton operation, with a 7B model's widths: what is compiled, counted and looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.decode import bgmv, mbgmv
from kernels.decoder import Heads, PagedCache
from kernels.gpu_ops import MAX_SPLITS, Rotary, Rows
from kernels.gpu_triton import TritonOperations
from kernels.sgmv import sgmv
from tests.support.kernel_cases import draw_case

HEADS, KV_HEADS, HEAD_DIM, INNER = 32, 8, 128, 14336
WINDOW = 4096
BLOCK_TOKENS = 16
LORA = {"bgmv": bgmv, "mbgmv": mbgmv, "sgmv": sgmv}

Call = tuple[str, Callable[[], None]]


def every_call(dtype: torch.dtype) -> Iterator[Call]:
    """(name of the operation and what is special of the call, the call), on CPU tensors."""
    yield from lora_calls(dtype)
    yield from layer_calls(dtype)
    yield from attention_calls(dtype, "", None)
    yield from attention_calls(dtype, ", window", WINDOW)


def lora_calls(dtype: torch.dtype) -> Iterator[Call]:
    """Yields calls of the LoRA operations on q, k, v."""
    width = HEADS * HEAD_DIM
    case = draw_case([8, 16], [(0, 1), (1, 1)], width, (width, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM), dtype)
    for name, operation in LORA.items():
        yield name, partial(operation, case.call())


def layer_calls(dtype: torch.dtype, tokens: int = 2) -> Iterator[Call]:
    operations, width = TritonOperations(), HEADS * HEAD_DIM
    x, residual, weight = (torch.zeros(*shape, dtype=dtype) for shape in ((tokens, width), (tokens, width), (width,)))
    yield "add_rms_norm", lambda: operations.add_rms_norm(x, weight, 1e-5, out=x, residual=residual)
    gate_up = torch.zeros(tokens, 2 * INNER, dtype=dtype)
    yield "silu_mul", lambda: operations.silu_mul(gate_up, out=gate_up.new_empty(tokens, INNER))
    qkv = torch.zeros(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    rotary = Rotary(*torch.zeros(2, 8, HEAD_DIM // 2, dtype=dtype).unbind())
    norms = torch.zeros(HEAD_DIM, dtype=dtype), torch.zeros(HEAD_DIM, dtype=dtype)
    at = torch.zeros(tokens, dtype=torch.int64)
    for name, norm_weights in (("", None), (", head norms", norms)):
        cache = empty_cache(Heads(HEADS, KV_HEADS, HEAD_DIM, 0.1, None, norm_weights, 1e-5), dtype)
        yield (
            f"rotate_and_store{name}",
            partial(operations.rotate_and_store, qkv, rotary, cache, positions=at, slots=at),
        )


def attention_calls(dtype: torch.dtype, name: str, window: int | None, tokens: int = 2) -> Iterator[Call]:
    operations, cache = TritonOperations(), empty_cache(Heads(HEADS, KV_HEADS, HEAD_DIM, 0.1, window), dtype)
    q, out = torch.zeros(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype), torch.zeros(tokens, HEADS * HEAD_DIM)
    scratch, out = torch.zeros(MAX_SPLITS, tokens, HEADS, HEAD_DIM + 2), out.to(dtype)
    context, table = torch.ones(tokens, dtype=torch.int32), torch.zeros(tokens, 4, dtype=torch.int32)
    starts = torch.arange(tokens + 1, dtype=torch.int32)
    yield (
        f"decode_attention{name}",
        lambda: operations.decode_attention(q, cache, Rows(context, table), out=out, scratch=scratch),
    )
    yield (
        f"prefill_attention{name}",
        lambda: operations.prefill_attention(q, cache, Rows(context, table, starts), out=out),
    )


def empty_cache(heads: Heads, dtype: torch.dtype) -> PagedCache:
    shape = (4 * BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    return PagedCache(heads, torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), BLOCK_TOKENS)
