"""Main loop of a CPU LoRA worker: find a command, compute its slice, answer.

Workers that split the weights of a slice first compute x A^T for their own rows of A, write it to the slot's xa area
and set their ready flags. Each then waits for the other flags and computes complete sums for its own columns of y. A
worker that waits too long, since another may have exited, computes all of x A^T itself. No worker's answer therefore
depends on another.
"""

from __future__ import annotations

import ctypes
import time

import torch

from kernels.build import CompileError
from kernels.compiled import COLUMNS
from kernels.handoff import (
    DISARMED,
    SEQUENCE_BITS,
    TIMED_OUT,
    CompiledFlags,
    Flags,
    NumpyFlags,
    check_machine,
)
from node_agent.adapter_memory.host_map import attach
from node_agent.coldstart.product import LONG_SLICE, Product
from node_agent.coldstart.shared import DTYPES, ECHO, MAX_RANK, Command, HandoffMemory, Layout, WorkerConfig
from node_agent.coldstart.slices import cut_columns, cut_rows, within

LATE_WAKE_US = 200
SHARES_WAIT_NS = 1_000_000
"""Nanoseconds that a worker waits for other workers' parts of x A^T, in addition to three times the duration of
computing its part."""


def load_flags() -> Flags:
    """Returns the compiled operations on flags in shared memory; without a compiler, those in numpy. Raises
    UnsupportedMachine."""
    check_machine()
    try:
        return CompiledFlags()
    except CompileError:
        return NumpyFlags()


class Worker:
    """CPU LoRA worker. It ignores commands whose epoch is that of an earlier process of this worker."""

    def __init__(self, config: WorkerConfig) -> None:
        self._memory = HandoffMemory(config.handoff_fd, config.layout)
        self._layout, self._index, self._epoch = config.layout, config.index, config.epoch
        self._flags = load_flags()
        self.product = Product(attach(config.host), config.layout)
        # these values are from before this process: ignore them
        before = [self._memory.command_value(at, config.index) for at in range(config.layout.commands)]
        self._values_seen = (ctypes.c_uint64 * len(before))(*before)
        self._start = 0

    def serve_while_armed(self, poll_ns: int) -> None:
        """Answers commands until the workers are disarmed and all commands posted before are answered. `poll_ns`:
        nanoseconds of polling between two checks for signals."""
        layout, index, memory = self._layout, self._index, self._memory
        first = memory.command_flags[0][index]
        while True:
            at = self._flags.next(first, layout.processes, self._values_seen, self._start, memory.armed[index], poll_ns)
            if at == DISARMED:
                return
            if at == TIMED_OUT:
                continue
            self._start = at + 1 if at + 1 < layout.commands else 0  # round robin over the commands
            value = memory.command_value(at, index)
            self._values_seen[at] = value
            command = memory.read_command(at, index)
            if value >> SEQUENCE_BITS == self._epoch and command.value == value:
                self._serve(at, command)
                self._flags.post(memory.done_flags[at][index], value)

    def _serve(self, at: int, command: Command) -> None:
        delay(command.before_us)
        if command.group != ECHO:
            self._compute(at, command)
        delay(command.after_us)

    def _compute(self, at: int, command: Command) -> None:
        layout, memory, slot = self._layout, self._memory, at // self._layout.steps
        begin, end, tokens = command.begin, command.end, command.tokens
        segments = memory.read_segments(at, command.segments)
        if not 0 <= begin <= end <= tokens == segments[-1][1] <= layout.max_tokens or command.dtype != layout.dtype:
            raise IndexError(f"{command} does not fit into {layout.max_tokens} tokens of {DTYPES[layout.dtype]}")
        if command.shares > 1:
            self._serve_share(at, command, segments)
            return
        d_in, widths = memory.group_widths[command.group]
        for _ in range(memory.repeats):
            for host_slot, low, high in within(segments, begin, end):
                x, ys = memory.x(slot, high, d_in, low), memory.y(slot, tokens, widths, low, high)
                self.product.compute(ys, x, host_slot, command.layer, command.group)

    def _serve_share(self, at: int, command: Command, segments: list[tuple[int, int]]) -> None:
        layout, memory, product, slot = self._layout, self._memory, self.product, at // self._layout.steps
        share, shares, layer, group = command.share, command.shares, command.layer, command.group
        if not (0 <= share < shares <= layout.processes and command.tokens <= layout.split_tokens):
            raise IndexError(f"{command}: {layout.processes} workers can share at most {layout.split_tokens} tokens")
        d_in, widths = memory.group_widths[group]
        parts = list(within(segments, 0, command.tokens))
        ranks = [product.ranks(host_slot, layer, group) for host_slot, _, _ in parts]
        xa, begin = memory.xa(slot, command.tokens, len(widths)), time.monotonic_ns()
        for _ in range(memory.repeats):
            for (host_slot, low, high), each in zip(parts, ranks, strict=True):
                x = memory.x(slot, high, d_in, low)
                product.shrink(xa[low:high], x, host_slot, layer, group, cut_rows(each, share, shares))
        self._flags.post(memory.ready_flags[at][share], command.tag)
        now = time.monotonic_ns()
        if not self._all_ready(at, command, now + 3 * (now - begin) + SHARES_WAIT_NS):
            xa = torch.empty(command.tokens, len(widths), MAX_RANK)  # a late worker may still write to the area
            for (host_slot, low, high), each in zip(parts, ranks, strict=True):
                x = memory.x(slot, high, d_in, low)
                product.shrink(xa[low:high], x, host_slot, layer, group, (0, sum(each)))
        columns = cut_columns(widths, [sum(each) for each in zip(*ranks, strict=True)], share, shares, COLUMNS)
        for _ in range(memory.repeats):
            for host_slot, low, high in parts:
                ys = memory.y(slot, command.tokens, widths, low, high)
                product.expand(ys, xa[low:high], host_slot, layer, group, columns)

    def _all_ready(self, at: int, command: Command, end_ns: int) -> bool:
        """Waits until all shares' parts of x A^T are ready, and returns True. Returns False at `end_ns` (monotonic
        nanoseconds)."""
        flags, wait = self._memory.ready_flags[at], self._flags.wait
        remaining_ns = (max(0, end_ns - time.monotonic_ns()) for _ in range(command.shares))
        return all(wait(flags[i], command.tag, ns) for i, ns in enumerate(remaining_ns))


def delay(microseconds: int) -> None:
    """Returns after `microseconds`. Sleeps for most of the time and spins at the end, since sleeps may overrun."""
    end = time.monotonic_ns() + microseconds * 1000
    if microseconds > LATE_WAKE_US:
        time.sleep((microseconds - LATE_WAKE_US) / 1e6)
    while time.monotonic_ns() < end:
        pass


def warm_up(product: Product, layout: Layout) -> None:
    """Initialises what a first call would: libraries, oneDNN kernels, the compiled operator. The host table may still
    be empty, so products of zeros are computed too."""
    for tokens in (1, LONG_SLICE):
        for group in range(ECHO):
            d_in, widths = layout.group_widths(group)
            ys = [torch.zeros(tokens, width, dtype=layout.torch_dtype) for width in widths]
            product.compute(ys, torch.zeros(tokens, d_in, dtype=layout.torch_dtype), 0, 0, group)
        for dtype in DTYPES:
            a, b = torch.zeros(16, layout.widths[0][0], dtype=dtype), torch.zeros(16, layout.widths[0][1], dtype=dtype)
            y = torch.zeros(tokens, b.shape[1], dtype=dtype)
            y.addmm_(torch.zeros(tokens, a.shape[1], dtype=dtype) @ a.t(), b, beta=0)
