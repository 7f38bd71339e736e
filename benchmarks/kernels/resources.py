"""Compiles the Triton kernels ahead of time for named GPUs, also where there is none, and reports what they need.

`python -m benchmarks.kernels.resources` is the compile matrix: a line per kernel and GPU, status 1 when one fails. With
--nvrtc it is that of handoff.cu.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton

from benchmarks.kernels.calls import every_call
from kernels.handoff_device import SOURCE, compile_cubin
from kernels.view import WEIGHT_DTYPES
from tests.support.kernel_recorder import recorded

CAPABILITIES = (80, 90, 100)
TYPE_NAMES = dict(zip(WEIGHT_DTYPES, ("fp32", "fp16", "bf16"), strict=True))


@dataclass(frozen=True)
class Compiled:
    sm: int
    kernel: str
    """the operation, and the kernel where it has another name"""
    dtype: str
    shared_bytes: int
    registers: int
    """registers per thread; -1 if the assembler's report names none"""
    spills: int


def compile_kernels(capability: int, dtype: torch.dtype) -> Iterator[Compiled]:
    """Every kernel as its operation launches it, for sm_`capability`. Raises what Triton's compiler raises."""
    done: set[str] = set()
    for operation, call in every_call(dtype):
        with recorded(capability) as launches:
            call()
        for launch in launches:
            if launch.key + launch.kernel not in done:
                done.add(launch.key + launch.kernel)
                compiled = launch.compile()
                registers, spills = _register_use(compiled.asm.get("cubin"))
                name = operation if operation.startswith(launch.kernel) else f"{operation}: {launch.kernel}"
                yield Compiled(capability, name, TYPE_NAMES[dtype], compiled.metadata.shared, registers, spills)


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
    match = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout)
    return (int(match[1]), int(match[2]) + int(match[3])) if match else (-1, -1)


def matrix(capabilities: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[dict[str, Any]]:
    for capability in capabilities:
        for dtype in dtypes:
            for compiled in compile_kernels(capability, dtype):
                yield asdict(compiled)


def cuda_matrix(capabilities: Sequence[int]) -> Iterator[dict[str, Any]]:
    """handoff.cu by NVRTC. Raises CompileError."""
    for capability in capabilities:
        registers, spills = _register_use(compile_cubin((capability // 10, capability % 10)))
        yield {"sm": capability, "kernel": SOURCE, "registers": registers, "spills": spills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sm", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--dtype", nargs="+", choices=TYPE_NAMES.values(), default=["bf16"])
    parser.add_argument("--nvrtc", action="store_true", help="compile handoff.cu, in the place of Triton's kernels")
    options = parser.parse_args()
    dtypes, begin = [dtype for dtype, name in TYPE_NAMES.items() if name in options.dtype], time.monotonic()
    for row in cuda_matrix(options.sm) if options.nvrtc else matrix(options.sm, dtypes):
        print(msgspec.json.encode(row).decode(), flush=True)
    compiler = "NVRTC" if options.nvrtc else f"Triton {triton.__version__}"
    print(f"{compiler}: all compiled in {time.monotonic() - begin:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
