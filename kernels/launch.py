"""How a kernel is launched: a small committed table per device, and a sane default elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import torch


@dataclass(frozen=True)
class Launch:
    """Tile sizes and splits of one operation. They never depend on ranks."""

    tokens: int = 16
    """tokens of one tile; 16 is the least that a tensor core takes"""
    ranks: int = 16
    shrink_width: int = 128
    """input columns of one step of the shrink"""
    expand_width: int = 128
    """output columns of one program of the expand"""
    splits: int = 4
    """programs that share a segment's input columns; their parts are added in a fixed order"""
    rank_programs: int = 2
    """programs that share a segment's ranks"""
    warps: int = 4
    stages: int = 3


DEFAULTS = {
    "bgmv": Launch(),
    "mbgmv": Launch(),
    "sgmv": Launch(tokens=64, ranks=32, shrink_width=64, expand_width=128, splits=1, rank_programs=1),
}


@cache
def launch_table() -> dict[str, dict[str, Launch]]:
    """Device name -> operation -> Launch, as committed in launch_table.json."""
    text = (files(__package__) / "launch_table.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, dict[str, Launch]])


@cache
def launch_for(operation: str, device: torch.device) -> Launch:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return launch_table().get(name, {}).get(operation, DEFAULTS[operation])


def three(values: Sequence[Any], absent: Any) -> list[Any]:
    """Kernels take three outputs; a smaller group leaves the others empty (width 0, no program)."""
    return [*values, *[absent] * (3 - len(values))]


def column_blocks(widths: Sequence[int], block: int) -> int:
    """Programs that cover the columns of all outputs, each in one of them."""
    return sum(-(-width // block) for width in widths)
