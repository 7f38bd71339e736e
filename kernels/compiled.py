"""LoRA on a CPU, with one call of the compiled operator (grouped_lora.cpp) per projection group."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kernels.build import load_library
from kernels.view import MAX_PROJECTIONS, GroupView, KernelArgumentError

DTYPES = {
    torch.float32: "grouped_lora_f32",
    torch.bfloat16: "grouped_lora_bf16",
    torch.float16: "grouped_lora_f16",
}

ALL = 1 << 62
"""End of the range that contains all rows or columns."""
COLUMNS = 32
"""Granularity in output columns: a multiple is a border of vectors and cache lines for every dtype."""

Operators = dict[torch.dtype, Any]


def load_operators() -> Operators:
    """Returns the operators by dtype, after compiling them if necessary (see `build`). Raises CompileError."""
    library = load_library()
    operators = {dtype: getattr(library, name) for dtype, name in DTYPES.items()}
    for operator in operators.values():
        operator.argtypes, operator.restype = (ctypes.c_void_p,), None
    return operators


class _Segments(ctypes.Structure):
    """The C struct of a pass's segments, with fields and order as in grouped_lora.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("start", "slot", "xa", "wide")),
        *((name, ctypes.c_int64) for name in ("count", "capacity", "threads")),
    )


class _Call(ctypes.Structure):
    """The C struct of one call, with fields and order as in grouped_lora.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pool", "rank", "scale", "first", "row_offset", "segments", "x")),
        ("y", ctypes.c_void_p * 3),
        ("y_stride", ctypes.c_int64 * 3),
        ("d_out", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in ("x_stride", "d_in", "table_stride", "projections")),
        *((name, ctypes.c_int64) for name in ("rows_begin", "rows_end", "columns_begin", "columns_end")),
    )


class Segments:
    """The segments of a pass, and the operator's scratch memory.

    The segments are checked once for all projection groups of the pass.
    """

    def __init__(
        self, seg_start: torch.Tensor, seg_slot: torch.Tensor, tokens: int, max_rank: int, widest: int, threads: int
    ) -> None:
        """
        seg_start   i32[S + 1]: first token of each segment, and the end of the last
        seg_slot    i32[S], -1 = base
        tokens      T, the number of tokens (rows) of x and of each y
        max_rank    the largest rank of the batch's adapters
        widest      the largest d_in of the groups
        threads     maximum number of threads; a segment's bits depend neither on it nor on the other segments

        Both tensors are read at each `CompiledGroup.add`. Raises KernelArgumentError.
        """
        count = seg_slot.shape[0]
        for name, tensor, length in (("seg_start", seg_start, count + 1), ("seg_slot", seg_slot, count)):
            if tensor.shape != (length,) or tensor.dtype is not torch.int32 or not tensor.is_contiguous():
                raise KernelArgumentError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; i32[{length}] is needed")
        self.tokens, self.widest, self.max_rank = tokens, widest, max_rank
        self.scratch = torch.empty(tokens * (MAX_PROJECTIONS * max_rank + widest))
        self._tensors = seg_start, seg_slot
        at = self.scratch.data_ptr()
        self._shared = _Segments(
            start=seg_start.data_ptr(),
            slot=seg_slot.data_ptr(),
            xa=at,
            wide=at + tokens * MAX_PROJECTIONS * max_rank * self.scratch.element_size(),
            count=count,
            capacity=max_rank,
            threads=threads,
        )
        self.own_xa: int = at
        self.address = ctypes.addressof(self._shared)

    def use_xa(self, address: int) -> None:
        """Sets the address of the buffer for the products x A^T: fp32 [T, projections, max_rank]."""
        self._shared.xa = address


class CompiledGroup:
    """The compiled operator bound to one projection group of one layer.

    Raises KernelArgumentError for weights in another dtype than fp32, bf16 and fp16, or on a GPU.
    """

    def __init__(self, operators: Operators, view: GroupView, d_in: int, d_outs: Sequence[int]) -> None:
        if view.pool.dtype not in DTYPES or view.pool.device.type != "cpu":
            raise KernelArgumentError(f"the compiled path takes fp32, bf16 and fp16 on a CPU, not {view.pool.dtype}")
        if len(d_outs) != view.projections:
            raise KernelArgumentError(f"{len(d_outs)} widths for {view.projections} projections")
        self._run = operators[view.pool.dtype]
        self.view, self.d_in, self.d_outs, self._dtype = view, d_in, tuple(d_outs), view.pool.dtype
        self._call = _Call(
            pool=view.pool.data_ptr(),
            rank=view.rank.data_ptr(),
            scale=view.scale.data_ptr(),
            first=view.first.data_ptr(),
            row_offset=view.row_offset.data_ptr(),
            d_out=(ctypes.c_int64 * 3)(*d_outs),
            d_in=d_in,
            table_stride=view.rank.stride(0),
            projections=view.projections,
            rows_end=ALL,
            columns_end=ALL,
        )
        self._reference = ctypes.byref(self._call)
        self._y, self._y_stride = self._call.y, self._call.y_stride

    def add(self, ys: Sequence[torch.Tensor], x: torch.Tensor, segments: Segments) -> None:
        """Adds LoRA to each output p: ys[p][t] += scale[s, p] * (x[t] @ A_sp^T) @ B_sp for each token t.

        s is the slot of the adapter of token t; A_sp and B_sp are this adapter's matrices for projection p. Computed in
        fp32.

        ys        P tensors [T, d_out of p], in place; rows of base segments (slot -1) and of rank 0 are not changed
        x         [T, d_in], rows of stride 1; dtype of ys and weights: fp32, bf16 or fp16
        segments  segments of the pass; their scratch memory is overwritten

        Raises KernelArgumentError.
        """
        self._take_x(x, segments)
        self._take_ys(ys, segments)
        self._call.segments = segments.address
        self._run(self._reference)

    def shrink(self, xa: torch.Tensor, x: torch.Tensor, segments: Segments, begin: int, end: int) -> None:
        """Computes xa[t, p, j] = x[t] . A_sp[j] for the rows j of A from `begin` to `end` - 1.

        Here s is the slot of the segment of token t, and p a projection. Rows are numbered consecutively across the
        projections of a segment. Nothing else is written; each sum is written once.

        xa        f32[T, P, segments.max_rank], contiguous, in place
        x         as for `add`

        Raises KernelArgumentError.
        """
        self._take_x(x, segments)
        self._run_part(xa, segments, (begin, end, 0, 0))

    def expand(self, ys: Sequence[torch.Tensor], xa: torch.Tensor, segments: Segments, begin: int, end: int) -> None:
        """Adds ys[p][t, c] += scale[s, p] * xa[t, p] @ B_sp[:, c] for the columns c from `begin` to `end` - 1.

        Columns are numbered consecutively across the projections. `ys` are as for `add`; `xa` must be complete, as
        written by `shrink`. Several calls that together cover all columns give the same bits as `add`. For that each
        border between calls must be a multiple of COLUMNS, counted from its projection's first column. Raises
        KernelArgumentError.
        """
        self._take_ys(ys, segments)
        self._run_part(xa, segments, (0, 0, begin, end))

    def _run_part(self, xa: torch.Tensor, segments: Segments, part: tuple[int, int, int, int]) -> None:
        shape = (segments.tokens, self.view.projections, segments.max_rank)
        if xa.shape != shape or xa.dtype is not torch.float32 or not xa.is_contiguous():
            raise KernelArgumentError(f"xa is {xa.dtype} {tuple(xa.shape)}; contiguous fp32 {list(shape)} is needed")
        call = self._call
        call.rows_begin, call.rows_end, call.columns_begin, call.columns_end = part
        segments.use_xa(xa.data_ptr())
        call.segments = segments.address
        self._run(self._reference)
        segments.use_xa(segments.own_xa)
        call.rows_begin, call.rows_end, call.columns_begin, call.columns_end = 0, ALL, 0, ALL

    def _take_x(self, x: torch.Tensor, segments: Segments) -> None:
        call, tokens, dtype = self._call, segments.tokens, self._dtype
        if x.shape != (tokens, self.d_in) or x.dtype is not dtype or x.stride(1) != 1:
            raise KernelArgumentError(f"x is {x.dtype} {tuple(x.shape)}; {dtype} [{tokens}, {self.d_in}] is needed")
        if self.d_in > segments.widest:
            raise KernelArgumentError(f"the segments' scratch is for widths up to {segments.widest}, not {self.d_in}")
        call.x, call.x_stride = x.data_ptr(), x.stride(0)

    def _take_ys(self, ys: Sequence[torch.Tensor], segments: Segments) -> None:
        tokens, dtype = segments.tokens, self._dtype
        for p, (y, width) in enumerate(zip(ys, self.d_outs, strict=True)):
            if y.shape != (tokens, width) or y.dtype is not dtype or y.stride(1) != 1:
                raise KernelArgumentError(
                    f"ys[{p}] is {y.dtype} {tuple(y.shape)}; {dtype} [{tokens}, {width}] is needed"
                )
            self._y[p] = y.data_ptr()
            self._y_stride[p] = y.stride(0)
