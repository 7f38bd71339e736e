"""Compiles the Triton kernels ahead of time for a named GPU, also where there is none, and reports what they need."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.decode import decode_expand, decode_shrink
from kernels.launch import TABLE_VIEWS, Launch, default_launch
from kernels.sgmv import sgmv_expand, sgmv_shrink
from kernels.view import WEIGHT_DTYPES

POINTERS = {"xa": "*fp32", "seg_start": "*i32", "seg_slot": "*i32", "rank": "*i32", "scale": "*fp32", "first": "*i32",
            "row_offset": "*i32"}  # fmt: skip
ALIGNED = ("x_stride", "s0", "s1", "s2", "d0", "d1", "d2", "d_in", "capacity")
WEIGHTS = ("x", "pool", "y0", "y1", "y2")
TYPE_NAMES = dict(zip(WEIGHT_DTYPES, ("fp32", "fp16", "bf16"), strict=True))


@dataclass(frozen=True)
class Compiled:
    kernel: str
    dtype: str
    shared_bytes: int
    """shared memory of one program"""
    registers: int
    """per thread, -1 when the assembler's report names none"""
    spills: int
    """bytes of local memory per thread"""


def compile_kernels(capability: int, dtype: torch.dtype) -> list[Compiled]:
    """Every kernel with its default tiles for sm_`capability`. Raises what Triton's compiler raises."""
    return [
        _compile(f"{name}_{side}", kernel, default_launch(name), pad, capability, dtype)
        for name, pad, kernels in (
            ("bgmv", 64, (decode_shrink, decode_expand)),
            ("mbgmv", 0, (decode_shrink, decode_expand)),
            ("sgmv", 0, (sgmv_shrink, sgmv_expand)),
        )
        for side, kernel in zip(("shrink", "expand"), kernels, strict=True)
    ]


def _compile(
    label: str, kernel: Callable[..., Any], how: Launch, pad: int, capability: int, dtype: torch.dtype
) -> Compiled:
    function: Any = kernel
    known = {
        "PAD": pad, "UNIT": 64 // dtype.itemsize, "SPLITS": how.splits, "RANK_PROGRAMS": how.rank_programs, "BS": 32,
        "BT": how.tokens, "BR": how.ranks, "BK": how.shrink_width, "BN": how.expand_width,
    }  # fmt: skip
    weights = f"*{TYPE_NAMES[dtype]}"
    constants = {name: known[name] for name in function.arg_names if name in known}
    signature = {
        name: "constexpr" if name in constants else weights if name in WEIGHTS else POINTERS.get(name, "i32")
        for name in function.arg_names
    }
    places = {name: (at,) for at, name in enumerate(function.arg_names)}
    # what the just-in-time compiler finds of real arguments: pointers, strides and widths are multiples of 16
    aligned = [n for n, kind in signature.items() if n in ALIGNED or (kind[0] == "*" and n not in TABLE_VIEWS)]
    source = ASTSource(
        function,
        signature,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": how.warps, "num_stages": how.stages}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _register_use(done.asm.get("cubin"))
    return Compiled(label, TYPE_NAMES[dtype], done.metadata.shared, registers, spills)


def _register_use(cubin: bytes | None) -> tuple[int, int]:
    """(registers, bytes of local memory) per thread, from the disassembler that Triton brings; (-1, -1) without one."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if cubin is None or not tool.exists():
        return -1, -1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, timeout=60
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout)
    return (int(found[1]), int(found[2]) + int(found[3])) if found else (-1, -1)
