"""Memory shared by engine and CPU LoRA workers: one memfd with flags, commands, inputs and outputs.

A slot is the memory of one handoff on a CPU, and of one pass on a GPU. It has an x area [tokens, d_in], and a y area
with [tokens, d_out] for each projection of the group in turn. A handoff uses one of the slot's `steps`. A step has the
segments, which assign tokens to adapters. For each worker it also has three lines (64 bytes of memory each). The
command flag is written by the engine or its device, the command by the engine before the flag, and the done flag by the
worker. Workers that split an adapter's weights share an xa area in each slot for their parts of x A^T, and set a ready
flag in a fourth line (worker.py). No device reads these.

On a CPU a slot has one step. On a GPU the handoffs of a pass are sequential on the device's stream, and use one step
each (stream.py). A slot stays allocated until all its workers have answered or exited; only then are its areas and
lines reused. The memory belongs to one engine process: a restarted engine creates a new one.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch

from kernels.handoff import LINE
from kernels.view import MAX_PROJECTIONS
from node_agent.adapter_memory.host_map import HostMap
from node_agent.coldstart.slices import MAX_SPLIT_TOKENS
from node_agent.types import GROUPS

MAX_BYTES = 4 << 30
"""Limit on the bytes of the memory. Any sensible size is below it."""
MAX_WORKERS = 64
MAX_SLOTS = 64
MAX_STEPS = 1024
MAX_SEGMENTS = 16
"""Maximum adapters of one handoff; fewer join a pass."""
MAX_RANK = 512
"""Maximum rank of a projection, as in adapters/validate.py."""
MAX_VIEWS = 4096
"""Maximum cached views of areas; each takes half a kilobyte."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ECHO = len(GROUPS)
"""Group code of a command that is answered without computing; for profiles and benchmarks."""
GROUP_NAMES = tuple(GROUPS)
PAGE = mmap.PAGESIZE
_COMMAND, _WORD, _SEGMENT = struct.Struct("<Q11iQ"), struct.Struct("<Q"), struct.Struct("<2i")
_REPEATS = _WORD.size
"""Byte offset of `HandoffMemory.repeats` in the shared memory, right behind the first worker's armed flag. The engine
writes it before all commands that it applies to."""


class Command(NamedTuple):
    """Command to a worker. `value` is a copy of the command flag's value; if they differ, the command was overwritten
    meanwhile."""

    value: int
    layer: int
    group: int
    """index into GROUP_NAMES, or ECHO"""
    begin: int
    """first token of its slice"""
    end: int
    tokens: int
    """number of tokens of the whole handoff, all of which are in the x area"""
    dtype: int
    """index into DTYPES"""
    segments: int
    """number of the command's segments, which assign its tokens to adapters"""
    before_us: int
    """simulated microseconds for x to cross the link, before the work begins"""
    after_us: int
    """simulated microseconds for the results to cross the link, before the answer is posted"""
    share: int
    """index of this worker's share of the weights"""
    shares: int
    """number of shares of the weights; 1: not split"""
    tag: int
    """value to which the workers of this handoff set their ready flags, unique to the handoff"""


class Layout(msgspec.Struct, frozen=True):
    """Layout of the shared memory. Engine and workers compute it from these numbers."""

    slots: int
    workers: int
    max_tokens: int
    widths: tuple[tuple[int, int], ...]
    """(d_in, d_out) per projection, as in BaseModel.widths"""
    dtype: int
    """index into DTYPES of the dtype of the weights, x and y"""
    steps: int = 1
    """maximum unanswered commands of a slot per worker"""
    spares: int = 0
    """number of spare workers in addition to `workers`; they get work only while another gets none (workers.py)"""

    def check(self) -> None:
        """Checks the sizes. Raises ValueError with the name of the first one that is out of range."""
        for name, value, limit in (
            ("slots", self.slots, MAX_SLOTS),
            ("steps", self.steps, MAX_STEPS),
            ("workers", self.processes, MAX_WORKERS),
            ("max_tokens", self.max_tokens, 1 << 20),
        ):
            if not 1 <= value <= limit:
                raise ValueError(f"{name} is {value}; 1 to {limit} are possible")
        if self.size > MAX_BYTES:
            raise ValueError(f"handoffs of {self.max_tokens} tokens take {self.size} bytes, the limit is {MAX_BYTES}")

    @property
    def processes(self) -> int:
        return self.workers + self.spares

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def group_widths(self, group: int) -> tuple[int, tuple[int, ...]]:
        """Returns d_in, and the d_out of each projection of the group."""
        members = GROUPS[GROUP_NAMES[group]]
        return self.widths[members[0]][0], tuple(self.widths[p][1] for p in members)

    @property
    def commands(self) -> int:
        """Returns the number of commands of each worker over all slots. The commands of slot s begin at index s *
        steps."""
        return self.slots * self.steps

    @property
    def _lines(self) -> int:
        return self.commands * self.processes * LINE

    def armed(self, worker: int) -> int:
        """Returns the byte offset of a worker's armed flag, a word that keeps the worker polling while it is not 0."""
        return worker * LINE

    def command_flag(self, command: int, worker: int) -> int:
        """Returns the byte offset of a worker's command flag. The flags of one worker's successive commands are
        `processes` * 64 bytes apart."""
        return self.armed(self.processes) + (command * self.processes + worker) * LINE

    def command(self, command: int, worker: int) -> int:
        return self.command_flag(command, worker) + self._lines

    def done_flag(self, command: int, worker: int) -> int:
        return self.command_flag(command, worker) + 2 * self._lines

    def ready_flag(self, command: int, share: int) -> int:
        """Returns the byte offset of a ready flag. The worker that has this share of the weights sets the flag once its
        part of x A^T is written."""
        return self.command_flag(command, share) + 3 * self._lines

    def failed(self, slot: int) -> int:
        """Returns the byte offset of a slot's i32 that a GPU sets if an answer did not arrive in time."""
        return self.command_flag(0, 0) + 4 * self._lines + slot * LINE

    def segments(self, command: int) -> int:
        """Returns the byte offset of a command's segments. Each segment is two i32, (host slot, end). The engine writes
        them before the command flag."""
        return self.failed(self.slots) + command * MAX_SEGMENTS * _SEGMENT.size

    @property
    def x_bytes(self) -> int:
        return _pages(self.max_tokens * max(d_in for d_in, _ in self.widths) * self.torch_dtype.itemsize)

    @property
    def y_bytes(self) -> int:
        widest = max(sum(self.group_widths(group)[1]) for group in range(ECHO))
        return _pages(self.max_tokens * widest * self.torch_dtype.itemsize)

    def x_area(self, slot: int) -> int:
        return _pages(self.segments(self.commands)) + slot * (self.x_bytes + self.y_bytes)

    def y_area(self, slot: int) -> int:
        return self.x_area(slot) + self.x_bytes

    @property
    def split_tokens(self) -> int:
        """Returns the maximum tokens of a handoff with split weights."""
        return min(self.max_tokens, MAX_SPLIT_TOKENS)

    @property
    def xa_bytes(self) -> int:
        return _pages(self.split_tokens * MAX_PROJECTIONS * MAX_RANK * torch.float32.itemsize)

    def xa_area(self, slot: int) -> int:
        """Returns the byte offset of a slot's xa area, f32[tokens, projections of the group, MAX_RANK]. The xa areas
        follow all x and y areas."""
        return self.x_area(self.slots) + slot * self.xa_bytes

    @property
    def size(self) -> int:
        return self.xa_area(self.slots)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that the engine writes, as JSON, on a worker's standard input."""

    parent: int
    """process id of the engine"""
    index: int
    cores: tuple[int, ...]
    """cores on which the worker may run: a single core, or all workers' cores for a spare"""
    epoch: int
    """number of this worker process, counted over all restarts; flag values with another epoch are not for it"""
    handoff_fd: int
    armed_fd: int
    """eventfd that is incremented when the worker is armed"""
    layout: Layout
    host: HostMap


class WorkerReady(msgspec.Struct, frozen=True):
    """Message of a worker that is warm."""

    compiled: bool
    cuda: bool


class HandoffMemory:
    """Mapping of the memfd, which stays mapped as long as views of it exist.

    All views share one torch storage. If tensors at the same address had several storages, Triton's interpreter would
    copy one over the other at the end of a kernel, and lose what a worker wrote meanwhile.
    """

    def __init__(self, fd: int, layout: Layout) -> None:
        self.layout = layout
        self._map = mmap.mmap(fd, layout.size)
        self._bytes = memoryview(self._map)
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._elements = memory.view(layout.torch_dtype)
        self._words64, self._words32 = memory.view(torch.int64), memory.view(torch.int32)
        self._floats = memory.view(torch.float32)
        self.address: int = memory.data_ptr()
        self.armed = [self.address + layout.armed(worker) for worker in range(layout.processes)]
        """addresses of the armed flags, by worker; the addresses of the other flags are by command and then by worker
        (or share)"""
        self.command_flags = self._by_worker(layout.command_flag, self.address)
        self.done_flags = self._by_worker(layout.done_flag, self.address)
        self.ready_flags = self._by_worker(layout.ready_flag, self.address)
        self._commands = self._by_worker(layout.command, 0)
        self._views: dict[tuple[torch.dtype, int, int, int], torch.Tensor] = {}
        """cached views of the areas, by (dtype, first element, rows, width). A pass needs the same views in each layer,
        and creating one takes a microsecond."""
        self._segments = [layout.segments(at) for at in range(layout.commands)]
        itemsize = layout.torch_dtype.itemsize
        self._areas = [(layout.x_area(s) // itemsize, layout.y_area(s) // itemsize) for s in range(layout.slots)]
        self.group_widths = [layout.group_widths(group) for group in range(ECHO)]
        """for each projection group, d_in and a tuple with the d_out of each projection"""

    def write_command(self, at: int, worker: int, command: tuple[int, ...]) -> None:
        """Writes the fields of a Command, passed as a plain tuple since creating a Command takes a microsecond."""
        _COMMAND.pack_into(self._bytes, self._commands[at][worker], *command)

    def read_command(self, at: int, worker: int) -> Command:
        return Command._make(_COMMAND.unpack_from(self._bytes, self._commands[at][worker]))

    def write_segments(self, at: int, segments: Iterable[tuple[int, int]]) -> None:
        """Writes (host slot, end) of each segment, at most MAX_SEGMENTS, for command `at` of all workers."""
        begin = self._segments[at]
        for host_slot, end in segments:
            _SEGMENT.pack_into(self._bytes, begin, host_slot, end)
            begin += _SEGMENT.size

    def read_segments(self, at: int, count: int) -> list[tuple[int, int]]:
        """Returns (host slot, end) of each of a command's segments. Raises IndexError for an impossible count."""
        if not 1 <= count <= MAX_SEGMENTS:
            raise IndexError(f"{count} segments; 1 to {MAX_SEGMENTS} are possible")
        begin = self._segments[at]
        return list(_SEGMENT.iter_unpack(self._bytes[begin : begin + count * _SEGMENT.size]))

    def command_value(self, at: int, worker: int) -> int:
        """Returns the current value of the command flag, without memory ordering."""
        value: int = _WORD.unpack_from(self._bytes, self.command_flags[at][worker] - self.address)[0]
        return value

    def lines(self, offset: int) -> torch.Tensor:
        """Returns i64[processes, 8]: the 64-byte lines of all workers for one command. `offset`: byte offset of the
        first worker's flag or command."""
        return self._words64.as_strided((self.layout.processes, LINE // 8), (LINE // 8, 1), offset // 8)

    def failed(self, slot: int) -> torch.Tensor:
        """Returns the i32[1] that a GPU sets if an answer for the slot did not arrive in time."""
        return self._words32[self.layout.failed(slot) // 4 :][:1]

    @property
    def repeats(self) -> int:
        """Returns how many times a worker computes each command, to simulate slower cores. The result is the same."""
        return max(1, int(_WORD.unpack_from(self._bytes, _REPEATS)[0]))

    @repeats.setter
    def repeats(self, value: int) -> None:
        _WORD.pack_into(self._bytes, _REPEATS, value)

    def x(self, slot: int, end: int, width: int, begin: int = 0) -> torch.Tensor:
        """Returns the view [end - begin, width] of tokens `begin` to `end` - 1 in the slot's x area."""
        return self._matrix(self._elements, self._areas[slot][0] + begin * width, end - begin, width)

    def y(
        self, slot: int, tokens: int, widths: Sequence[int], begin: int = 0, end: int | None = None
    ) -> list[torch.Tensor]:
        """Returns a view [end - begin, width] of the slot's y area for each of the widths. The views have tokens
        `begin` to `end` - 1, by default all. The y area has the outputs of `tokens` tokens for one width after
        another."""
        at, rows, outputs = self._areas[slot][1], (tokens if end is None else end) - begin, []
        for width in widths:
            outputs.append(self._matrix(self._elements, at + begin * width, rows, width))
            at += tokens * width
        return outputs

    def xa(self, slot: int, tokens: int, projections: int) -> torch.Tensor:
        """Returns the view f32[tokens, projections, MAX_RANK] of the slot's xa area; `tokens` is at most
        `layout.split_tokens`."""
        at = self.layout.xa_area(slot) // torch.float32.itemsize
        return self._matrix(self._floats, at, tokens, projections * MAX_RANK).view(tokens, projections, MAX_RANK)

    def _matrix(self, elements: torch.Tensor, at: int, rows: int, width: int) -> torch.Tensor:
        view = self._views.get((elements.dtype, at, rows, width))
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = elements.as_strided((rows, width), (width, 1), at)
            self._views[elements.dtype, at, rows, width] = view
        return view

    def _by_worker(self, offset: Callable[[int, int], int], base: int) -> list[list[int]]:
        layout = self.layout
        return [[base + offset(at, worker) for worker in range(layout.processes)] for at in range(layout.commands)]


def make_memory(layout: Layout) -> int:
    """Returns a memfd of the layout's size whose pages are allocated and zero. A write therefore never fails for lack
    of memory. The caller closes it. Raises ValueError."""
    layout.check()
    fd = os.memfd_create("garnish-handoff", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, layout.size)
    except OSError as error:
        os.close(fd)
        raise ValueError(f"handoffs: {layout.size} bytes can't be reserved ({error.strerror})") from error
    return fd
