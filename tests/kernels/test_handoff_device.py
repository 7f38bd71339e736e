"""The device's side of a handoff: Triton's kernels in its interpreter with real workers, and both forms compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.9", reason="NOT RUN: atomic_store and atomic_poll came with Triton 3.9")

from kernels.handoff import flag_value
from kernels.handoff_triton import launch_copy_and_signal, launch_wait
from node_agent.coldstart.shared import Command
from tests.node_agent.coldstart.pools import CORES, draw_x, drawn_case, poison, started

ROOT = Path(__file__).parents[2]
SECOND_NS = 1_000_000_000


def words(*values: int) -> torch.Tensor:
    """i64[n, 8]: a line each."""
    lines = torch.full((len(values), 8), -1)
    lines[:, 0] = torch.tensor(values)
    return lines


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])
def test_copy_then_signal(size: int) -> None:
    x, target, ticket = torch.randn(size), torch.full((size + 7,), torch.nan), torch.zeros(1, dtype=torch.int32)
    flags, values = words(0, 11, 0), words(5, 0, flag_value(3, 9))
    for _ in range(2):  # the ticket is ready again
        launch_copy_and_signal(x, target, ticket, flags, values)
        assert torch.equal(target[:size], x) and target[size:].isnan().all() and int(ticket) == 0
    assert torch.equal(flags, words(5, 11, flag_value(3, 9)))


def test_a_wait_that_succeeds_and_one_that_times_out() -> None:
    poisoned = torch.zeros(1, dtype=torch.int32)
    launch_wait(words(4, 7, 9), words(4, 0, 9), SECOND_NS, poisoned)
    assert int(poisoned) == 0
    launch_wait(words(4, 7, 9), words(4, 0, 8), 1000, poisoned)
    assert int(poisoned) == 1


def test_with_real_workers() -> None:
    """The kernels in the engine's place: workers find the command, and the wait ends by their answer."""
    case = drawn_case(torch.float32)
    count = min(2, len(CORES))
    try:
        with started(case, count) as pool:
            poison(pool)
            memory, layout = pool.memory, pool.layout
            tokens, slot, x = 24, 1, draw_x(24, 40, torch.float32)
            epochs = [worker.epoch for worker in pool._keeper.workers]
            values = words(*[flag_value(epoch, 100) for epoch in epochs])
            for worker in range(count):
                begin, end = tokens * worker // count, tokens * (worker + 1) // count
                command = Command(int(values[worker, 0]), 2, 0, 0, begin, end, tokens, layout.dtype)
                memory.write_command(slot, worker, command)
            flags = torch.frombuffer(memory._map, dtype=torch.int64)
            lines = [flags[at // 8 :][: 8 * count].view(count, 8) for at in
                     (layout.command_flag(slot, 0), layout.done_flag(slot, 0))]  # fmt: skip
            poisoned = torch.zeros(1, dtype=torch.int32)
            launch_wait(lines[1], values, 1000, poisoned)
            assert int(poisoned) == 1  # nobody has signalled
            poisoned.zero_()
            ticket = torch.zeros(1, dtype=torch.int32)
            launch_copy_and_signal(x, memory.x(slot, tokens, 40), ticket, lines[0], values)
            launch_wait(lines[1], values, 100 * SECOND_NS, poisoned)
            assert int(poisoned) == 0
            ys = memory.y(slot, tokens, memory.group_widths[0][1])
            for y, want in zip(ys, case.expected(x, 2, 0, "qkv"), strict=True):
                assert float((y.double() - want).abs().max()) <= 1e-4
    finally:
        case.close()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.handoff_triton import copy_and_signal, wait_for_workers
flags = {"command_flags": "*i64", "done_flags": "*i64", "values": "*i64", "timeout_ns": "i64"}
for kernel, types, fixed in (
    (copy_and_signal, {**flags, "x": "*bf16", "target": "*bf16", "ticket": "*i32", "size": "i32", "workers": "i32"},
     {"BLOCK": 1024}),
    (wait_for_workers, {**flags, "poisoned": "*i32"}, {}),
):
    signature = {name: "constexpr" if name in fixed else types[name] for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(kernel, signature, constexprs=constants)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""
ORDER = (
    r"st\S*\.release\.sys|fence\.release\.sys",
    r"ld\S*\.acquire\.sys|fence\.acquire\.sys",
    r"atom\S*\.acq_rel",
    r"bar\.sync",
    r"globaltimer",
)
"""The instructions, or fences before and after plain ones."""


def test_triton_compiles_to_the_promised_memory_order(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert all(re.search(pattern, done.stdout) for pattern in ORDER), done.stdout


def test_cuda_source_compiles(tmp_path: Path) -> None:
    source = ROOT / "kernels" / "handoff.cu"
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("NOT RUN: there is no nvcc here to compile handoff.cu with")
    command = [nvcc, "-arch=sm_90", "-ptx", str(source), "-o", str(tmp_path / "handoff.ptx")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "handoff.ptx").read_text()
    assert all(re.search(pattern, text) for pattern in ORDER), text
