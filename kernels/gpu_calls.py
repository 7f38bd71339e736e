"""Checks of the arguments of `gpu_ops` that need no read from a device. All raise KernelArgumentError."""

from __future__ import annotations

import torch

from kernels.decoder import MAX_HEAD, PagedCache
from kernels.gpu_ops import MAX_SPLITS, Rotary, Rows
from kernels.view import WEIGHT_DTYPES, KernelArgumentError, check_tensor


def check_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None) -> None:
    _check_rows("x", x, None, weight.shape[0])
    check_tensor("weight", weight, x.dtype, (x.shape[1],), x.device)
    for name, tensor in (("out", out), ("residual", residual)):
        if tensor is not None:
            check_tensor(name, tensor, x.dtype, tuple(x.shape), x.device)


def check_silu(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    _check_rows("gate_up", gate_up, None, 2 * out.shape[-1])
    check_tensor("out", out, gate_up.dtype, (gate_up.shape[0], gate_up.shape[1] // 2), gate_up.device)


def check_rotation(
    qkv: torch.Tensor, rotary: Rotary, cache: PagedCache, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    heads = cache.heads
    _check_rows("qkv", qkv, None, (heads.heads + 2 * heads.kv_heads) * heads.head_dim)
    _check_cache(qkv, cache)
    for name, tensor in (("positions", positions), ("slots", slots)):
        check_tensor(name, tensor, torch.int64, (qkv.shape[0],), qkv.device)
    table = (rotary.cos.shape[0], heads.head_dim // 2)
    for name, tensor in (("rotary.cos", rotary.cos), ("rotary.sin", rotary.sin)):
        check_tensor(name, tensor, qkv.dtype, table, qkv.device)
    for tensor in heads.norms or ():
        check_tensor("a head norm", tensor, qkv.dtype, (heads.head_dim,), qkv.device)


def check_decode(q: torch.Tensor, cache: PagedCache, rows: Rows, out: torch.Tensor, scratch: torch.Tensor) -> None:
    if rows.query_start is not None:
        raise KernelArgumentError("decode rows have one token each: query_start must be None")
    count = rows.context_len.shape[0]
    _check_attention(q, cache, rows, out)
    if q.shape[0] != count:
        raise KernelArgumentError(f"q has {q.shape[0]} rows; context_len has {count}")
    splits = scratch.shape[0]
    if not 1 <= splits <= MAX_SPLITS:
        raise KernelArgumentError(f"the scratch is for {splits} splits; 1 to {MAX_SPLITS} can be added up")
    check_tensor(
        "scratch", scratch, torch.float32, (splits, count, cache.heads.heads, cache.heads.head_dim + 2), q.device
    )


def check_prefill(q: torch.Tensor, cache: PagedCache, rows: Rows, out: torch.Tensor) -> None:
    if rows.query_start is None:
        raise KernelArgumentError("query_start must say which tokens belong to which row")
    check_tensor("query_start", rows.query_start, torch.int32, (rows.context_len.shape[0] + 1,), q.device)
    _check_attention(q, cache, rows, out)


def _check_attention(q: torch.Tensor, cache: PagedCache, rows: Rows, out: torch.Tensor) -> None:
    width = cache.heads.heads * cache.heads.head_dim
    if q.dim() != 2 or q.shape[1] < width:
        raise KernelArgumentError(f"q must be [T, >= {width}], not {tuple(q.shape)}")
    _check_rows("q", q, q.shape[0], q.shape[1])
    _check_cache(q, cache)
    check_tensor("out", out, q.dtype, (q.shape[0], width), q.device)
    count = rows.context_len.shape[0]
    check_tensor("context_len", rows.context_len, torch.int32, (count,), q.device)
    table = rows.block_table
    if table.dtype is not torch.int32 or table.device != q.device or table.dim() != 2 or table.stride(1) != 1:
        raise KernelArgumentError(f"block_table must be i32[R, blocks] on {q.device}, rows of stride 1")
    if table.shape[0] != count:
        raise KernelArgumentError(f"block_table has {table.shape[0]} rows; context_len has {count}")


def _check_cache(like: torch.Tensor, cache: PagedCache) -> None:
    heads = cache.heads
    if not heads.covered:
        raise KernelArgumentError(
            f"{heads.heads} heads of {heads.head_dim} over {heads.kv_heads} can't be computed: widths must be even and "
            f"at most {MAX_HEAD}, and every key head have equally many heads"
        )
    shape = (cache.keys.shape[0], heads.kv_heads, heads.head_dim)
    for name, tensor in (("keys", cache.keys), ("values", cache.values)):
        check_tensor(name, tensor, like.dtype, shape, like.device)


def _check_rows(name: str, tensor: torch.Tensor, rows: int | None, width: int) -> None:
    """Checks that the tensor is [rows, width] with rows of stride 1. `rows` None allows any number of rows."""
    if tensor.dtype not in WEIGHT_DTYPES:
        raise KernelArgumentError(f"{name} is {tensor.dtype}; one of {WEIGHT_DTYPES} is needed")
    if tensor.dim() != 2 or tensor.shape[1] != width or rows not in (None, tensor.shape[0]) or tensor.stride(1) != 1:
        raise KernelArgumentError(
            f"{name} must be [{'T' if rows is None else rows}, {width}] with rows of stride 1, not "
            f"{tuple(tensor.shape)} of strides {tensor.stride()}"
        )
