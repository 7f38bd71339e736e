"""The loop of a CPU LoRA worker: find a command, compute its slice, answer."""

from __future__ import annotations

import ctypes
import time

import torch

from kernels.build import CompileError
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
from node_agent.coldstart.shared import DTYPES, ECHO, Command, HandoffMemory, Layout
from node_agent.coldstart.slices import within
from node_agent.coldstart.worker_process import WorkerConfig

LATE_WAKE_US = 200
"""Microseconds by which a sleep may end late."""


def load_flags() -> Flags:
    """The compiled ones, numpy's where there is no compiler. Raises UnsupportedMachine."""
    check_machine()
    try:
        return CompiledFlags()
    except CompileError:
        return NumpyFlags()


class Worker:
    """Commands of other epochs, which were meant for a process that had this place before, are passed over."""

    def __init__(self, config: WorkerConfig) -> None:
        self._memory = HandoffMemory(config.handoff_fd, config.layout)
        self._layout, self._index, self._epoch = config.layout, config.index, config.epoch
        self._flags = load_flags()
        self.product = Product(attach(config.host), config.layout)
        # what stands there now is from before this process: it is passed over too
        before = [self._memory.command_value(at, config.index) for at in range(config.layout.commands)]
        self._seen = (ctypes.c_uint64 * len(before))(*before)
        self._start = 0

    def serve_while_armed(self, poll_ns: int) -> None:
        """Answer commands until the workers are disarmed and every command posted before that is answered."""
        layout, index, memory = self._layout, self._index, self._memory
        first = memory.command_flags[0][index]
        while True:
            at = self._flags.next(first, layout.processes, self._seen, self._start, memory.armed[index], poll_ns)
            if at == DISARMED:
                return
            if at == TIMED_OUT:
                continue
            self._start = at + 1 if at + 1 < layout.commands else 0  # requests in turn
            value = memory.command_value(at, index)
            self._seen[at] = value
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
        d_in, widths = memory.group_widths[command.group]
        for _ in range(memory.repeats):
            for host_slot, low, high in within(segments, begin, end):
                x, ys = memory.x(slot, high, d_in, low), memory.y(slot, tokens, widths, low, high)
                self.product.compute(ys, x, host_slot, command.layer, command.group)


def delay(microseconds: int) -> None:
    """Returns after so many microseconds. Sleeps through all but the last ones, which the system may overrun."""
    end = time.monotonic_ns() + microseconds * 1000
    if microseconds > LATE_WAKE_US:
        time.sleep((microseconds - LATE_WAKE_US) / 1e6)
    while time.monotonic_ns() < end:
        pass


def warm_up(product: Product, layout: Layout) -> None:
    """Whatever a first call sets up (libraries, oneDNN's code, the compiled operator) is set up now. The host table may
    be empty yet, so products of zeros are made as well."""
    for tokens in (1, LONG_SLICE):
        for group in range(ECHO):
            d_in, widths = layout.group_widths(group)
            ys = [torch.zeros(tokens, width, dtype=layout.torch_dtype) for width in widths]
            product.compute(ys, torch.zeros(tokens, d_in, dtype=layout.torch_dtype), 0, 0, group)
        for dtype in DTYPES:
            a, b = torch.zeros(16, layout.widths[0][0], dtype=dtype), torch.zeros(16, layout.widths[0][1], dtype=dtype)
            y = torch.zeros(tokens, b.shape[1], dtype=dtype)
            y.addmm_(torch.zeros(tokens, a.shape[1], dtype=dtype) @ a.t(), b, beta=0)
