"""Launch sizes of the LoRA kernels, from a committed table with an entry per GPU and a default.

A GPU without an entry uses that of another GPU with the same compute capability, if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import msgspec
import torch

from kernels.view import MAX_PROJECTIONS, LoraCall, check_call

TABLE = files(__package__) / "launch_table.json"
DEFAULT = "default"
OPERATIONS = ("bgmv", "mbgmv", "sgmv")
UNALIGNED = ("rank", "scale", "first", "seg_start", "seg_slot")
"""Arguments without a fixed alignment, since they are slices of the AdapterTable or of the buffer uploaded for each
pass.

Kernels must not be specialised on their alignment, or they would have to be compiled again for some layers or batches.
"""

Tile = Annotated[int, msgspec.Meta(ge=16, le=512)]
Few = Annotated[int, msgspec.Meta(ge=1, le=32)]


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tile sizes and splits of one operation. They never depend on ranks. Tile sizes are powers of two."""

    tokens: Tile
    ranks: Tile
    shrink_width: Tile
    """number of input columns that the shrink reads per step of its loop"""
    expand_width: Tile
    """number of output columns that a program of the expand computes"""
    splits: Few
    """number of programs among which a segment's input columns are divided; their sums are added in a fixed order"""
    rank_programs: Few
    warps: Few = 4
    stages: Few = 3

    def __post_init__(self) -> None:
        for name in ("tokens", "ranks", "shrink_width", "expand_width", "warps"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"{name} must be a power of two, not {value}")


class Tuned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table's entry for one device."""

    tuned: str
    """date and versions of the tuning, or a note that there was none"""
    operations: dict[str, Launch]
    capability: str = ""
    """compute capability such as "9.0"; the entry is also used for other devices that have it"""

    def __post_init__(self) -> None:
        if set(self.operations) != set(OPERATIONS):
            raise ValueError(f"operations must be {', '.join(OPERATIONS)}, not {', '.join(sorted(self.operations))}")


def read_table(text: bytes) -> dict[str, Tuned]:
    """Returns the table's entries by device name. Raises ValueError that says where the table is wrong."""
    try:
        table = msgspec.json.decode(text, type=dict[str, Tuned])
    except msgspec.MsgspecError as error:
        raise ValueError(f"launch table: {error}; make it again with benchmarks.kernels.tune") from error
    if DEFAULT not in table:
        raise ValueError(f"launch table: there is no {DEFAULT!r}, which every unlisted device needs")
    return table


@cache
def launch_table() -> dict[str, Tuned]:
    """Returns the table in launch_table.json, read once. Raises ValueError."""
    return read_table(TABLE.read_bytes())


@cache
def launch_for(operation: str, device: torch.device) -> Launch:
    """Returns the sizes tuned for this GPU, else for one with its compute capability, else the default."""
    if device.type != "cuda":
        return default_launch(operation)
    return choose_tuned(torch.cuda.get_device_name(device), capability_of(device)).operations[operation]


def choose_tuned(name: str, capability: str) -> Tuned:
    """Returns the table's entry for a GPU with this name and compute capability."""
    table = launch_table()
    alike = (tuned for tuned in table.values() if tuned.capability == capability)
    return table.get(name) or next(alike, table[DEFAULT])


def capability_of(device: torch.device) -> str:
    """Returns a GPU's compute capability, such as "9.0"."""
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


def default_launch(operation: str) -> Launch:
    return launch_table()[DEFAULT].operations[operation]


def column_blocks(widths: Sequence[int], block: int) -> int:
    """Returns the number of programs that cover all outputs, if each computes `block` columns of one output."""
    return sum(-(-width // block) for width in widths)


def launch_pair(pair: tuple[Any, Any], tiles: int, call: LoraCall, sizes: Launch, **special: int) -> None:
    """Launches the kernels `pair`, a shrink and an expand, with `tiles` programs per slice.

    `special` are arguments that only this pair has. Raises KernelArgumentError before the first launch.
    """
    check_call(call, sizes.splits)
    ys, x, view, segments = call.ys, call.x, call.view, (call.seg_start, call.seg_slot)
    if not call.seg_slot.shape[0] or not x.shape[0]:
        return
    shrink, expand = pair
    widths, absent = [y.shape[1] for y in ys], MAX_PROJECTIONS - len(ys)
    # for a group of fewer than three projections the missing outputs get width 0, so no program computes them
    outputs = (*ys, *[ys[0]] * absent, *(y.stride(0) for y in ys), *[0] * absent, *widths, *[0] * absent)
    table_stride, scratch_sizes = view.rank.stride(0), call.xa.shape[1:]
    shared = {"UNIT": view.unit, "SPLITS": sizes.splits, "BT": sizes.tokens, "BR": sizes.ranks,
              "num_warps": sizes.warps, "num_stages": sizes.stages, **special}  # fmt: skip
    shrink[(tiles, view.projections * sizes.rank_programs, sizes.splits)](
        x, x.stride(0), call.xa, *segments, view.pool, view.rank, view.first, view.row_offset, table_stride,
        *scratch_sizes, x.shape[1], RANK_PROGRAMS=sizes.rank_programs, BK=sizes.shrink_width, **shared,
    )  # fmt: skip
    expand[(tiles, column_blocks(widths, sizes.expand_width))](
        call.xa, *outputs, *segments, view.pool, view.rank, view.scale, view.first, view.row_offset, table_stride,
        *scratch_sizes, BN=sizes.expand_width, **shared,
    )  # fmt: skip
