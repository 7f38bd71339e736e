"""The CPU's fast path: one call of a compiled operator per projection group (grouped_lora.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernels.build import load_library
from kernels.view import GroupView, KernelArgumentError

DTYPES = {torch.float32: "grouped_lora_f32", torch.bfloat16: "grouped_lora_bf16"}

Operators = dict[torch.dtype, Any]
"""The operator per dtype of the weights."""


def load_operators(cache: Path | None = None) -> Operators:
    """Compiled first, if need be: see `build`. Raises CompileError. One call per process is enough."""
    library = load_library(cache)
    operators = {dtype: getattr(library, name) for dtype, name in DTYPES.items()}
    for operator in operators.values():
        operator.argtypes, operator.restype = (ctypes.c_void_p,), None
    return operators


class Call(ctypes.Structure):
    """As in grouped_lora.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pool", "rank", "scale", "first", "row_offset")),
        *((name, ctypes.c_void_p) for name in ("seg_start", "seg_slot", "x")),
        ("y", ctypes.c_void_p * 3),
        ("xa", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64 * 3),
        ("d_out", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("x_stride", "d_in", "table_stride", "projections", "segments")),
        *((name, ctypes.c_int64) for name in ("capacity", "threads")),
    )


class CompiledGroup:
    """One projection group of one layer. Raises KernelArgumentError for what the operator can't take (fp16, a GPU)."""

    def __init__(self, operators: Operators, view: GroupView, d_in: int, d_outs: Sequence[int]) -> None:
        if view.pool.dtype not in DTYPES or view.pool.device.type != "cpu":
            raise KernelArgumentError(f"the compiled path takes fp32 and bf16 on a CPU, not {view.pool.dtype}")
        if len(d_outs) != view.projections:
            raise KernelArgumentError(f"{len(d_outs)} widths for {view.projections} projections")
        self._run = operators[view.pool.dtype]
        self.view, self.d_in, self.d_outs = view, d_in, tuple(d_outs)
        self._call = Call(
            pool=view.pool.data_ptr(),
            rank=view.rank.data_ptr(),
            scale=view.scale.data_ptr(),
            first=view.first.data_ptr(),
            row_offset=view.row_offset.data_ptr(),
            d_out=(ctypes.c_int64 * 3)(*d_outs),
            d_in=d_in,
            table_stride=view.rank.stride(0),
            projections=view.projections,
        )
        self._reference = ctypes.byref(self._call)

    def add(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        seg_start: torch.Tensor,
        seg_slot: torch.Tensor,
        xa: torch.Tensor,
        wide: torch.Tensor,
        threads: int,
    ) -> None:
        """ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for every segment's tokens t and its slot s, in fp32.

        ys        P tensors [T, d_out of p], in place; rows of base segments (slot -1) and of rank 0 are not touched
        x         [T, d_in], rows of stride 1; dtype of ys and weights: fp32 or bf16
        seg_start i32[S + 1]: first token of each segment, and the end of the last
        seg_slot  i32[S], -1 = base
        xa        f32[>= T, P, capacity], scratch, in place; capacity at least the batch's largest rank
        wide      f32[>= T, d_in], scratch, in place: x in fp32
        threads   at most so many; the result's bits depend neither on them nor on the other segments

        Raises KernelArgumentError.
        """
        call, tokens, dtype = self._call, x.shape[0], self.view.pool.dtype
        if x.shape != (tokens, self.d_in) or x.dtype is not dtype or x.stride(1) != 1:
            raise KernelArgumentError(f"x is {x.dtype} {tuple(x.shape)}; {dtype} [T, {self.d_in}] is needed")
        for p, (y, width) in enumerate(zip(ys, self.d_outs, strict=True)):
            if y.shape != (tokens, width) or y.dtype is not dtype or y.stride(1) != 1:
                raise KernelArgumentError(
                    f"ys[{p}] is {y.dtype} {tuple(y.shape)}; {dtype} [{tokens}, {width}] is needed"
                )
            call.y[p] = y.data_ptr()
            call.y_stride[p] = y.stride(0)
        _check_scratch(xa, (tokens, self.view.projections, 1))
        _check_scratch(wide, (tokens, self.d_in))
        segments = seg_slot.shape[0]
        if (
            seg_start.shape[0] != segments + 1
            or seg_start.dtype is not torch.int32
            or seg_slot.dtype is not torch.int32
        ):
            raise KernelArgumentError(f"seg_start and seg_slot must be i32[{segments + 1}] and i32[{segments}]")
        call.x, call.x_stride = x.data_ptr(), x.stride(0)
        call.seg_start, call.seg_slot, call.segments = seg_start.data_ptr(), seg_slot.data_ptr(), segments
        call.xa, call.wide, call.capacity, call.threads = xa.data_ptr(), wide.data_ptr(), xa.shape[2], threads
        self._run(self._reference)


def _check_scratch(scratch: torch.Tensor, least: tuple[int, ...]) -> None:
    fits = scratch.dim() == len(least) and scratch.shape[0] >= least[0] and scratch.shape[1] == least[1]
    if not fits or scratch.dtype is not torch.float32 or not scratch.is_contiguous():
        raise KernelArgumentError(f"scratch is {scratch.dtype} {tuple(scratch.shape)}; f32 {least} is needed")
