"""The device's side of a handoff: handoff.cu with its threads as a CPU's, with real workers, and compiled."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.handoff import flag_value
from kernels.handoff_device import CudaKernels, Signal, StreamKernels, compile_cubin
from node_agent.coldstart.shared import PAGE, Command, HandoffMemory, Layout, make_memory
from node_agent.coldstart.workers import WorkerPool
from tests.node_agent.coldstart.pools import CORES, WIDTHS, draw_x, drawn_case, poison, started
from tests.support.host_case import HostCase
from tests.support.host_kernels import HostKernels

UNSPLIT = (0, 0, 0, 1, 0)
"""Fields of a command without a simulated link, of a worker that has all weights."""
ROOT = Path(__file__).parents[2]
SECOND_NS = 1_000_000_000
SEQUENCES = itertools.count(100)
"""of the flags' values: none twice"""


def words(*values: int) -> torch.Tensor:
    """i64[n, 8]: a line each."""
    lines = torch.full((len(values), 8), -1)
    lines[:, 0] = torch.tensor(values)
    return lines


@pytest.fixture(scope="module")
def emulated_cuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """handoff.cu as it is, compiled for this CPU under another handoff_order.h."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("NOT RUN: there is no g++ here to compile handoff.cu with")
    place = tmp_path_factory.mktemp("emulated")
    for file in (*(ROOT / "tests" / "kernels" / "emulated_cuda").iterdir(), ROOT / "kernels" / "handoff.cu"):
        shutil.copy(file, place)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "launch.cpp", "-o", "launch.so", "-lpthread"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(place / "launch.so"))


class EmulatedKernels(CudaKernels):
    """What CudaKernels would launch, with its own grids and arguments, on this CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def _launch(self, name: bytes, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._library.launch(int(name == b"wait_for_workers"), blocks, threads, addresses)


@pytest.fixture(params=["cuda", "host"])
def kernels(request: pytest.FixtureRequest) -> StreamKernels:
    """The CUDA source with its threads as a CPU's, and what other tests have in its place."""
    return HostKernels() if request.param == "host" else EmulatedKernels(request.getfixturevalue("emulated_cuda"))


def word() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_then_signal(kernels: StreamKernels, size: int, dtype: torch.dtype) -> None:
    x, target, ticket = torch.randn(size).to(dtype), torch.full((size + 7,), torch.nan, dtype=dtype), word()
    flags, values = words(0, 11, 0), words(5, 0, flag_value(3, 9))
    for _ in range(2):  # the ticket is ready again
        kernels.copy_and_signal(x, target[:size], ticket, Signal(flags, values, word()))
        assert torch.equal(target[:size], x) and target[size:].isnan().all() and int(ticket) == 0
    assert torch.equal(flags, words(5, 11, flag_value(3, 9)))


def test_rows_that_begin_anywhere(kernels: StreamKernels) -> None:
    x, target, flags = torch.randn(40)[1:], torch.zeros(41), words(0)
    kernels.copy_and_signal(x, target[2:], word(), Signal(flags, words(7), word()))
    assert torch.equal(target[2:], x) and not target[:2].any() and torch.equal(flags, words(7))


def test_a_wait_that_succeeds_and_one_that_times_out(kernels: StreamKernels) -> None:
    poisoned, failed = word(), word()
    kernels.wait(Signal(words(4, 7, 9), words(4, 0, 9), poisoned), SECOND_NS, failed)
    assert (int(poisoned), int(failed)) == (0, 0)
    kernels.wait(Signal(words(4, 7, 9), words(4, 0, 8), poisoned), 1000, failed)
    assert (int(poisoned), int(failed)) == (1, 1)


def test_a_poisoned_pass_neither_signals_nor_waits(kernels: StreamKernels) -> None:
    x, target, poisoned, failed = torch.ones(2000), torch.zeros(2000), word() + 1, word()
    flags, ticket = words(3), word()
    kernels.copy_and_signal(x, target, ticket, Signal(flags, words(8), poisoned))
    kernels.wait(Signal(words(3), words(8), poisoned), 1000 * SECOND_NS, failed)
    assert not target.any() and torch.equal(flags, words(3)) and (int(ticket), int(failed)) == (0, 0)


def pages_of(fd: int) -> set[int]:
    """The pages of a memfd that have been read or written since it was made, or cut to nothing."""
    found: set[int] = set()
    at, size = 0, os.fstat(fd).st_size
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: from here on there is nothing
            break
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        found |= set(range(begin // PAGE, -(-at // PAGE)))
    return found


@pytest.mark.parametrize("dtype", [0, 1])
def test_they_touch_nothing_that_is_not_theirs(kernels: StreamKernels, dtype: int) -> None:
    """A worker writes its answer while they run."""
    layout = Layout(3, 2, 96, WIDTHS, dtype, steps=2)
    fd = make_memory(layout)
    try:
        memory, slot, at = HandoffMemory(fd, layout), 1, 2
        os.ftruncate(fd, 0)
        os.ftruncate(fd, layout.size)
        assert not pages_of(fd)
        for worker in range(layout.workers):
            memory.write_command(at, worker, (flag_value(1, 1), 0, 0, 0, 40, 40, dtype, 1, *UNSPLIT))
        flags, commands, done = (
            memory.lines(offset(at, 0)) for offset in (layout.command_flag, layout.command, layout.done_flag)
        )
        x, failed, poisoned = draw_x(40, 40, layout.torch_dtype), memory.failed(slot), word()
        kernels.copy_and_signal(x, memory.x(slot, 40, 40), word(), Signal(flags, commands, poisoned))
        kernels.wait(Signal(done, commands, poisoned), 1000, failed)
        assert memory.command_value(at, 0) == flag_value(1, 1) and int(failed) == 1
        assert torch.equal(memory.x(slot, 40, 40), x)
        lines = range(layout.x_area(0) // PAGE)
        area = range(layout.x_area(slot) // PAGE, layout.y_area(slot) // PAGE)
        assert {area[0]} < pages_of(fd) <= {*lines, *area}
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def kept() -> Iterator[tuple[HostCase, WorkerPool]]:
    case = drawn_case(torch.float32)
    try:
        with started(case, min(2, len(CORES))) as pool:
            pool.disarm()
            yield case, pool
    finally:
        case.close()


@pytest.fixture
def workers(kept: tuple[HostCase, WorkerPool]) -> Iterator[tuple[HostCase, WorkerPool]]:
    kept[1].arm()
    yield kept
    kept[1].disarm()


def test_with_real_workers(kernels: StreamKernels, workers: tuple[HostCase, WorkerPool]) -> None:
    """The kernels in the engine's place: workers find the command, and the wait ends by their answer."""
    case, pool = workers
    memory, layout, count = pool.memory, pool.layout, pool.layout.workers
    poison(pool)
    tokens, slot, x = 24, 1, draw_x(24, 40, torch.float32)
    sequence = next(SEQUENCES)
    values = words(*[flag_value(worker.epoch, sequence) for worker in pool._keeper.workers])
    for worker in range(count):
        begin, end = tokens * worker // count, tokens * (worker + 1) // count
        command = Command(int(values[worker, 0]), 0, 0, begin, end, tokens, layout.dtype, 1, *UNSPLIT)
        memory.write_command(slot, worker, command)
    memory.write_segments(slot, [(2, tokens)])
    flags, done = (memory.lines(offset(slot, 0)) for offset in (layout.command_flag, layout.done_flag))
    poisoned, failed = word(), word()
    kernels.wait(Signal(done, values, poisoned), 1000, failed)
    assert int(failed) == 1  # nobody has signalled
    poisoned.zero_()
    failed.zero_()
    kernels.copy_and_signal(x, memory.x(slot, tokens, 40), word(), Signal(flags, values, poisoned))
    kernels.wait(Signal(done, values, poisoned), 100 * SECOND_NS, failed)
    assert int(failed) == 0
    ys = memory.y(slot, tokens, memory.group_widths[0][1])
    for y, want in zip(ys, case.expected(x, 2, 0, "qkv"), strict=True):
        assert float((y.double() - want).abs().max()) <= 1e-4


ORDER = (
    r"st\S*\.release\.sys|fence\.release\.sys",
    r"ld\S*\.acquire\.sys|fence\.acquire\.sys",
    r"atom\S*\.acq_rel",
    r"bar\.sync",
    r"globaltimer",
)
"""The instructions, or fences before and after plain ones."""


def test_cuda_source_compiles_by_nvrtc() -> None:
    """Which is what an engine on a GPU does."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NOT RUN: no NVRTC is here")
    assert compile_cubin((9, 0)).startswith(b"\x7fELF")


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
