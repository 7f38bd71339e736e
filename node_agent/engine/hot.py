"""The hot pass: rows whose adapters are on the device, computed together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from node_agent.device import unless_out_of_memory
from node_agent.engine.batch import Row, share_out
from node_agent.engine.joining import Joined
from node_agent.engine.pulse import Pulse
from node_agent.types import ModelRunner, PassLora, StepBatch, StepOutput

GROWS_AFTER = 16
"""Passes that succeeded, before the next ones may have twice as many tokens."""
LARGEST = 1 << 20
"""Tokens; no pass has more, so that the bound is lifted there."""

Tensors = Callable[[list[Row], int, Joined | None], tuple[StepBatch, PassLora | None]]


@dataclass(frozen=True)
class Computed:
    """A pass that has ended. The first `n_decode` of its rows decoded."""

    rows: list[Row]
    n_decode: int
    output: StepOutput
    seconds: float
    """Duration of the pass alone, with all its adapters on the device; 0: not known."""


@dataclass(frozen=True)
class OutOfMemory:
    """There was no memory for a pass of the rows, of which nothing counts."""

    rows: list[Row]

    @property
    def is_hopeless(self) -> bool:
        """A single token was too much."""
        return sum(row.length for row in self.rows) == 1


class PassSize:
    """Tokens that a hot pass may have: fewer than it could after there was too little memory for one."""

    def __init__(self) -> None:
        self._max_tokens = LARGEST
        self._succeeded = 0
        self._next_row = 0
        """index of the row that is first in turn where not all fit"""

    def cut(self, rows: list[Row], n_decode: int) -> tuple[list[Row], int]:
        """Returns the rows that fit, in their order, and how many of them decode. The first `n_decode` of `rows` do.
        The last row may be a shorter chunk."""
        if sum(row.length for row in rows) <= self._max_tokens:
            return rows, n_decode
        begin, remaining = self._next_row % len(rows), self._max_tokens
        lengths = [0] * len(rows)
        for index in [*range(begin, len(rows)), *range(begin)]:
            lengths[index] = min(rows[index].length, remaining)
            remaining -= lengths[index]
        self._next_row += sum(map(bool, lengths))
        fit = [Row(row.request, length) for row, length in zip(rows, lengths, strict=True) if length]
        return fit, sum(map(bool, lengths[:n_decode]))

    def shrink(self, tokens: int) -> None:
        """Lowers the bound: there was no memory for a pass of `tokens` tokens."""
        self._max_tokens, self._succeeded = max(1, min(tokens, self._max_tokens) // 2), 0

    def grow(self) -> None:
        """A pass succeeded."""
        self._succeeded += 1
        if self._succeeded >= GROWS_AFTER and self._max_tokens < LARGEST:
            self._max_tokens, self._succeeded = 2 * self._max_tokens, 0


class HotPasses:
    def __init__(self, runner: ModelRunner, tensors: Tensors, pulse: Pulse) -> None:
        self._runner, self._tensors, self._pulse, self._size = runner, tensors, pulse, PassSize()
        self._layers_at_once = 1 if runner.device.type == "cpu" else runner.num_layers
        """elsewhere a pass is enqueued as a whole"""

    def compute(self, rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
        """Computes as many of the rows as lately fitted in memory; the first `n_decode` are decode steps. `joined` has
        what those of adapters that are on their way need. Returns OutOfMemory, and makes the next passes smaller, when
        even these did not fit."""
        rows, n_decode = self._size.cut(rows, n_decode)
        started_at = time.perf_counter()
        output = unless_out_of_memory(lambda: self.forward(rows, n_decode, joined=joined))
        if output is None:
            self._size.shrink(sum(row.length for row in rows))
            return OutOfMemory(rows)
        self._size.grow()
        seconds = time.perf_counter() - started_at
        share_out(seconds, rows)
        return Computed(rows, n_decode, output, 0.0 if joined else seconds)

    def enqueue(self, rows: list[Row], fed: list[int] | None = None) -> StepOutput:
        """Enqueues a step of decode rows; `fed` as in StepBatch. What it computes is there after `await_output`."""
        batch, lora = self._tensors(rows, len(rows), None)
        run = self._runner.start(replace(batch, fed=fed), lora)
        with self._pulse.computing("layers", len(rows), self._runner.num_layers):
            run.advance(self._runner.num_layers)
            return run.finish()

    def await_output(self, output: StepOutput, tokens: int) -> None:
        """Returns when a pass of `tokens` tokens has ended."""
        with self._pulse.computing("end", tokens):
            output.done.synchronize()

    def forward(
        self,
        rows: list[Row],
        n_decode: int,
        should_yield: Callable[[], bool] | None = None,
        joined: Joined | None = None,
    ) -> StepOutput | None:
        """Computes a whole pass of which nothing is booked. Returns when its tokens are there; or None when
        `should_yield`, asked before it and, on a CPU, before each layer, has ended it."""
        run, layers = self._runner.start(*self._tensors(rows, n_decode, joined)), self._runner.num_layers
        tokens, step = sum(row.length for row in rows), self._layers_at_once
        try:
            for layer in range(step, layers + 1, step):
                if should_yield is not None and should_yield():
                    run.abort().synchronize()
                    return None
                with self._pulse.computing("layers", tokens, step):
                    run.advance(layer)
            with self._pulse.computing("end", tokens):
                output = run.finish()
                output.done.synchronize()
        except (RuntimeError, MemoryError):  # for want of memory, perhaps: then the next pass is to find some
            run.abort().synchronize()
            raise
        return output
