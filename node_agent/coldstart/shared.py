"""The memory that engine and CPU LoRA workers share: one memfd of flags, commands, inputs and outputs.

Every slot has an x area [tokens, d_in] and a y area, [tokens, d_out] for one projection of the group after the other.
For each of its `steps` there are the segments, that is whose the tokens are, and for each worker three lines of 64
bytes: a command flag (written by the engine or its device), what it commands (by the engine, before the flag), and a
done flag (by the worker). Workers that split an adapter's weights share an xa area in each slot, where each has a part
of x A^T for the others, and raise a ready flag in a fourth line (worker.py); no device reads these.

On a CPU a slot has one step and belongs to one handoff; on a GPU it belongs to a pass, whose handoffs follow each other
on the device's stream and have a step each (stream.py). It has its owner until all workers have answered or are dead;
only then are its areas and lines written again. The memory belongs to one engine process: the next one makes its own,
and never maps this.
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
"""More than any sensible slots take; a larger size is a mistake."""
MAX_WORKERS = 64
MAX_SLOTS = 64
MAX_STEPS = 1024
MAX_SEGMENTS = 16
"""Adapters of one handoff; fewer join a pass."""
MAX_RANK = 512
"""Largest rank of a projection, as in adapters/validate.py."""
MAX_VIEWS = 4096
"""Number of views of areas that are cached; each takes half a kilobyte."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ECHO = len(GROUPS)
"""Code in a command's place for a group: answer, compute nothing. For profiles and benchmarks."""
GROUP_NAMES = tuple(GROUPS)
PAGE = mmap.PAGESIZE
_COMMAND, _WORD, _SEGMENT = struct.Struct("<Q11iQ"), struct.Struct("<Q"), struct.Struct("<2i")
_REPEATS = _WORD.size
"""Offset of the simulated slow-down, in the line of the first armed flag: written before any command that it is for."""


class Command(NamedTuple):
    """Command to a worker. `value` is its flag's: by it a worker sees that a command was overwritten meanwhile."""

    value: int
    layer: int
    group: int
    """index into GROUP_NAMES, or ECHO"""
    begin: int
    """first token of its slice"""
    end: int
    tokens: int
    """number of tokens in the x area"""
    dtype: int
    """index into DTYPES"""
    segments: int
    """number of the command's segments, which say whose tokens these are"""
    before_us: int
    """simulated link: microseconds in which x crosses, before the work begins"""
    after_us: int
    """simulated link: microseconds in which the results cross, before the answer is posted"""
    share: int
    """index of this worker's share of the weights"""
    shares: int
    """1: it has all weights"""
    tag: int
    """value that the ready flags of this handoff's shares get, unique to the handoff"""


class Layout(msgspec.Struct, frozen=True):
    """Layout of the shared memory. Both sides compute it from these numbers."""

    slots: int
    workers: int
    max_tokens: int
    widths: tuple[tuple[int, int], ...]
    """(d_in, d_out) per projection, as BaseModel.widths"""
    dtype: int
    """index into DTYPES: of the host pool's weights, x and y"""
    steps: int = 1
    """commands to each worker that a slot's owner may have given before the first is answered"""
    spares: int = 0
    """workers beyond `workers`, which get work only while others of them get none (workers.py)"""

    def check(self) -> None:
        """Raises ValueError with the size that is wrong."""
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
        """(d_in, d_out of each projection)."""
        members = GROUPS[GROUP_NAMES[group]]
        return self.widths[members[0]][0], tuple(self.widths[p][1] for p in members)

    @property
    def commands(self) -> int:
        """Returns how many commands each worker has, over all slots; those of a slot begin at slot * steps."""
        return self.slots * self.steps

    @property
    def _lines(self) -> int:
        return self.commands * self.processes * LINE

    def armed(self, worker: int) -> int:
        """Offset of the word that keeps the worker polling while it is not 0, like those below in bytes."""
        return worker * LINE

    def command_flag(self, command: int, worker: int) -> int:
        """Returns the offset of a command flag. Those of one worker's commands are `processes` lines apart."""
        return self.armed(self.processes) + (command * self.processes + worker) * LINE

    def command(self, command: int, worker: int) -> int:
        return self.command_flag(command, worker) + self._lines

    def done_flag(self, command: int, worker: int) -> int:
        return self.command_flag(command, worker) + 2 * self._lines

    def ready_flag(self, command: int, share: int) -> int:
        """Written by the worker that has the share: its part of x A^T is there."""
        return self.command_flag(command, share) + 3 * self._lines

    def failed(self, slot: int) -> int:
        """i32, written by a GPU: an answer did not come in time."""
        return self.command_flag(0, 0) + 4 * self._lines + slot * LINE

    def segments(self, command: int) -> int:
        """(host slot, end) of each segment, i32; written by the engine before the command flag."""
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
        """Returns how many tokens a handoff may have whose weights are split."""
        return min(self.max_tokens, MAX_SPLIT_TOKENS)

    @property
    def xa_bytes(self) -> int:
        return _pages(self.split_tokens * MAX_PROJECTIONS * MAX_RANK * torch.float32.itemsize)

    def xa_area(self, slot: int) -> int:
        """f32[tokens, projections of the group, MAX_RANK]; these areas lie behind all x and y areas."""
        return self.x_area(self.slots) + slot * self.xa_bytes

    @property
    def size(self) -> int:
        return self.xa_area(self.slots)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    parent: int
    """process id of the engine"""
    index: int
    cores: tuple[int, ...]
    """cores on which it may run: one for itself; a spare worker has those of all"""
    epoch: int
    """epoch of the flag values that are meant for this process, and not for one that had its place before"""
    handoff_fd: int
    armed_fd: int
    """eventfd: counts up when the worker is armed"""
    layout: Layout
    host: HostMap


class WorkerReady(msgspec.Struct, frozen=True):
    compiled: bool
    cuda: bool


class HandoffMemory:
    """A mapping of the memfd. Views of it keep it mapped.

    All of them share one torch storage. Of tensors at one address in several storages Triton's interpreter copies one
    over the other when a kernel ends, all bytes onto themselves: what a worker writes meanwhile would be lost.
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
        """Addresses of flags, the latter by command and worker, or share."""
        self.command_flags = self._by_worker(layout.command_flag, self.address)
        self.done_flags = self._by_worker(layout.done_flag, self.address)
        self.ready_flags = self._by_worker(layout.ready_flag, self.address)
        self._commands = self._by_worker(layout.command, 0)
        self._views: dict[tuple[torch.dtype, int, int, int], torch.Tensor] = {}
        """views of the areas, by their arguments: a pass asks for the same in each layer, and making one takes a
        microsecond"""
        self._segments = [layout.segments(at) for at in range(layout.commands)]
        itemsize = layout.torch_dtype.itemsize
        self._areas = [(layout.x_area(s) // itemsize, layout.y_area(s) // itemsize) for s in range(layout.slots)]
        self.group_widths = [layout.group_widths(group) for group in range(ECHO)]
        """(d_in, d_out of each projection)"""

    def write_command(self, at: int, worker: int, command: tuple[int, ...]) -> None:
        """`command` has Command's fields; making one takes a microsecond."""
        _COMMAND.pack_into(self._bytes, self._commands[at][worker], *command)

    def read_command(self, at: int, worker: int) -> Command:
        return Command._make(_COMMAND.unpack_from(self._bytes, self._commands[at][worker]))

    def write_segments(self, at: int, segments: Iterable[tuple[int, int]]) -> None:
        """(host slot, end) of each, MAX_SEGMENTS at most, for command `at` of all workers."""
        begin = self._segments[at]
        for host_slot, end in segments:
            _SEGMENT.pack_into(self._bytes, begin, host_slot, end)
            begin += _SEGMENT.size

    def read_segments(self, at: int, count: int) -> list[tuple[int, int]]:
        """Returns the host slot and end of each of a command's segments. Raises IndexError when there can't be so
        many."""
        if not 1 <= count <= MAX_SEGMENTS:
            raise IndexError(f"{count} segments; 1 to {MAX_SEGMENTS} are possible")
        begin = self._segments[at]
        return list(_SEGMENT.iter_unpack(self._bytes[begin : begin + count * _SEGMENT.size]))

    def command_value(self, at: int, worker: int) -> int:
        """Returns what the command flag holds now, without any promise of memory order."""
        value: int = _WORD.unpack_from(self._bytes, self.command_flags[at][worker] - self.address)[0]
        return value

    def lines(self, offset: int) -> torch.Tensor:
        """i64[processes, 8] from a command's first flag, command or done flag on: its lines, one for each worker."""
        return self._words64.as_strided((self.layout.processes, LINE // 8), (LINE // 8, 1), offset // 8)

    def failed(self, slot: int) -> torch.Tensor:
        """i32[1]"""
        return self._words32[self.layout.failed(slot) // 4 :][:1]

    @property
    def repeats(self) -> int:
        """Returns how many times a worker computes each command, to pretend slower cores; the result stays the same."""
        return max(1, int(_WORD.unpack_from(self._bytes, _REPEATS)[0]))

    @repeats.setter
    def repeats(self, value: int) -> None:
        _WORD.pack_into(self._bytes, _REPEATS, value)

    def x(self, slot: int, end: int, width: int, begin: int = 0) -> torch.Tensor:
        """[end - begin, width]: tokens `begin` to `end` of the x area."""
        return self._matrix(self._elements, self._areas[slot][0] + begin * width, end - begin, width)

    def y(
        self, slot: int, tokens: int, widths: Sequence[int], begin: int = 0, end: int | None = None
    ) -> list[torch.Tensor]:
        """Returns [tokens, width] for each width, one after the other from the y area's beginning. Of each it has the
        tokens `begin` to `end`, which is all of them by default."""
        at, rows, outputs = self._areas[slot][1], (tokens if end is None else end) - begin, []
        for width in widths:
            outputs.append(self._matrix(self._elements, at + begin * width, rows, width))
            at += tokens * width
        return outputs

    def xa(self, slot: int, tokens: int, projections: int) -> torch.Tensor:
        """f32[tokens, projections, MAX_RANK], `layout.split_tokens` at most."""
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
    """A memfd of the layout's size whose pages exist, all zero: a write to it never fails for want of memory. The
    caller closes it. Raises ValueError."""
    layout.check()
    fd = os.memfd_create("garnish-handoff", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, layout.size)
    except OSError as error:
        os.close(fd)
        raise ValueError(f"handoffs: {layout.size} bytes can't be reserved ({error.strerror})") from error
    return fd
