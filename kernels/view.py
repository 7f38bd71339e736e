"""Arguments of the LoRA operations: one projection group of one layer, as views of the AdapterTable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROW_ALIGN = 64
"""Unit of `row_offset`, in bytes."""
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_PROJECTIONS = 3


class KernelArgumentError(ValueError):
    """A tensor of a call does not fit the operation. Nothing has been launched."""


def check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None = None
) -> None:
    """Raises KernelArgumentError unless the tensor is contiguous and has this dtype, shape and device.

    `device` None allows any device.
    """
    is_there = device is None or tensor.device == device
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous() or not is_there:
        at, wanted_at = ("", "") if device is None else (f" on {tensor.device}", f" on {device}")
        raise KernelArgumentError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}{at}; contiguous {dtype} {shape}{wanted_at} is needed"
        )


@dataclass(frozen=True)
class GroupView:
    """Views of the AdapterTable for P projections that share their input.

    Addresses are fixed, so one view serves all passes.

    pool       flat, the weights' dtype; rows begin at multiples of ROW_ALIGN bytes
    rank       i32[slots, P], 0 = not adapted
    scale      f32[slots, P]
    first      i32[slots, P, 2]: indices in row_offset of the first row of A and of B
    row_offset i32[rows]: offset of each row from the pool's start, in units of ROW_ALIGN bytes
    """

    pool: torch.Tensor
    rank: torch.Tensor
    scale: torch.Tensor
    first: torch.Tensor
    row_offset: torch.Tensor

    @property
    def projections(self) -> int:
        return self.rank.shape[1]

    @property
    def unit(self) -> int:
        """The number of elements in ROW_ALIGN bytes."""
        return ROW_ALIGN // self.pool.element_size()


def group_view(
    pool: torch.Tensor,
    rank: torch.Tensor,
    scale: torch.Tensor,
    first: torch.Tensor,
    row_offset: torch.Tensor,
    layer: int,
    members: Sequence[int],
) -> GroupView:
    """Returns the view of the adjacent projections `members` (indices) of `layer`.

    rank i32[slots, layers, projections], scale f32[slots, layers, projections] and first i32[slots, layers,
    projections, 2] are those of the complete table. Raises KernelArgumentError.
    """
    low, high = members[0], members[-1] + 1
    if list(members) != list(range(low, high)) or len(members) > MAX_PROJECTIONS:
        raise KernelArgumentError(f"a group is one to {MAX_PROJECTIONS} neighbouring projections, not {list(members)}")
    for name, tensor, dtype in (
        ("rank", rank, torch.int32),
        ("scale", scale, torch.float32),
        ("first", first, torch.int32),
        ("row_offset", row_offset, torch.int32),
    ):
        if tensor.dtype is not dtype or tensor.device != pool.device or not tensor.is_contiguous():
            raise KernelArgumentError(f"{name} must be contiguous {dtype} on {pool.device}")
    if pool.dtype not in WEIGHT_DTYPES or pool.dim() != 1 or not pool.is_contiguous() or pool.data_ptr() % ROW_ALIGN:
        raise KernelArgumentError(f"the pool must be flat, one of {WEIGHT_DTYPES}, {ROW_ALIGN}-byte aligned")
    where = (slice(None), layer, slice(low, high))
    return GroupView(pool, rank[where], scale[where], first[where], row_offset)


@dataclass
class LoraCall:
    """Arguments of one LoRA operation: inputs, outputs, and the slot of each segment of tokens. All are on the device.

    ys        P tensors [T, d_out of p], in place; rows of base segments (slot -1) and of rank 0 are not changed
    x         [T, d_in], rows of stride 1
    seg_start i32[S + 1]: first token of each segment, and the end of the last; segments may be empty
    seg_slot  i32[S], -1 = base
    view      the group's part of the AdapterTable; its dtype (fp32, fp16, bf16) is that of x and ys
    xa        f32[>= splits, >= P, >= T, capacity], scratch, in place
    max_rank  upper bound of the batch's ranks, known on the host; at most `capacity` of xa
    """

    ys: Sequence[torch.Tensor]
    x: torch.Tensor
    seg_start: torch.Tensor
    seg_slot: torch.Tensor
    view: GroupView
    xa: torch.Tensor
    max_rank: int


def check_call(call: LoraCall, splits: int) -> None:
    """Checks everything about a call that can be checked without reading from the device.

    Raises KernelArgumentError.
    """
    view, xa, device, tokens = call.view, call.xa, call.view.pool.device, call.x.shape[0]
    if len(call.ys) != view.projections:
        raise KernelArgumentError(f"{len(call.ys)} outputs for {view.projections} projections")
    for name, tensor in (("x", call.x), *((f"ys[{i}]", y) for i, y in enumerate(call.ys))):
        if tensor.dtype is not view.pool.dtype or tensor.device != device:
            raise KernelArgumentError(
                f"{name} is {tensor.dtype} on {tensor.device}, weights {view.pool.dtype}, {device}"
            )
        if tensor.dim() != 2 or tensor.shape[0] != tokens or tensor.stride(1) != 1:
            raise KernelArgumentError(
                f"{name} must be [{tokens}, width] with rows of stride 1, not {tuple(tensor.shape)}"
            )
    segments = call.seg_slot.shape[0]
    for name, tensor, size in (("seg_start", call.seg_start, segments + 1), ("seg_slot", call.seg_slot, segments)):
        if tensor.dtype is not torch.int32 or tensor.device != device or tensor.shape != (size,):
            raise KernelArgumentError(f"{name} must be i32[{size}] on {device}")
        if not tensor.is_contiguous():
            raise KernelArgumentError(f"{name} must be contiguous")
    if xa.dtype is not torch.float32 or xa.device != device or not xa.is_contiguous() or xa.dim() != 4:
        raise KernelArgumentError(f"the scratch xa must be contiguous f32[splits, P, T, capacity] on {device}")
    if xa.shape[0] < splits or xa.shape[1] < view.projections or xa.shape[2] < tokens:
        raise KernelArgumentError(
            f"xa is {tuple(xa.shape)}; at least [{splits}, {view.projections}, {tokens}, {call.max_rank}] is needed"
        )
    if not 0 <= call.max_rank <= xa.shape[3]:
        raise KernelArgumentError(
            f"the batch's largest rank is {call.max_rank}; the scratch xa has room for {xa.shape[3]}"
        )
