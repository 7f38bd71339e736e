"""The hot pass: one pass for all rows whose adapters are on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from node_agent.device import unless_out_of_memory
from node_agent.engine.joining import Joined
from node_agent.engine.pulse import Pulse
from node_agent.engine.rows import Row, share_out
from node_agent.types import ModelRunner, PassLora, StepBatch, StepOutput

GROWS_AFTER = 16
"""Number of successful passes after which the token limit doubles."""
LARGEST = 1 << 20
"""Token limit that counts as no limit."""

Tensors = Callable[[list[Row], int, Joined | None], tuple[StepBatch, PassLora | None]]


@dataclass(frozen=True)
class Computed:
    """Finished pass. The first `n_decode` of its rows were decode rows."""

    rows: list[Row]
    n_decode: int
    output: StepOutput
    seconds: float
    """Duration of the pass in seconds, if nothing else ran and all its adapters were on the device; 0 if unknown."""


@dataclass(frozen=True)
class OutOfMemory:
    """Result of a pass that ran out of memory: nothing was computed for its rows."""

    rows: list[Row]

    @property
    def is_hopeless(self) -> bool:
        """Returns whether even a single token was too much."""
        return sum(row.length for row in self.rows) == 1


class PassSize:
    """Limit on the tokens of a hot pass. It is halved when a pass runs out of memory, and doubled after GROWS_AFTER
    successes."""

    def __init__(self) -> None:
        self._max_tokens = LARGEST
        self._succeeded = 0
        self._next_row = 0
        """index of the row to serve first if not all fit"""

    def cut(self, rows: list[Row], n_decode: int) -> tuple[list[Row], int]:
        """Returns the rows that fit into a pass, in order, and the number of decode rows among them. The first
        `n_decode` of `rows` are decode rows. The last prompt chunk may be shortened."""
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
        """Lowers the limit after a pass of `tokens` tokens ran out of memory."""
        self._max_tokens, self._succeeded = max(1, min(tokens, self._max_tokens) // 2), 0

    def grow(self) -> None:
        """Counts a successful pass, and raises the limit after GROWS_AFTER of them."""
        self._succeeded += 1
        if self._succeeded >= GROWS_AFTER and self._max_tokens < LARGEST:
            self._max_tokens, self._succeeded = 2 * self._max_tokens, 0


class HotPasses:
    """Hot passes of an engine, with a token limit that adapts to free memory."""

    def __init__(self, runner: ModelRunner, tensors: Tensors, pulse: Pulse) -> None:
        self._runner, self._tensors, self._pulse, self._size = runner, tensors, pulse, PassSize()
        self._layers_at_once = 1 if runner.device.type == "cpu" else runner.num_layers
        """number of layers enqueued at once: one on a CPU, all on a GPU"""

    def compute(self, rows: list[Row], n_decode: int, joined: Joined | None = None) -> Computed | OutOfMemory:
        """Computes one pass of as many of the rows as the token limit allows. The first `n_decode` are decode rows.
        `joined` computes the LoRA terms of rows whose adapters are still loading.

        Returns the finished pass. Returns OutOfMemory, and lowers the limit, when memory was short.
        """
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
        """Enqueues a step of decode rows and returns its output, to be read after `await_output`. `fed`: as in
        StepBatch."""
        batch, lora = self._tensors(rows, len(rows), None)
        run = self._runner.start(replace(batch, fed=fed), lora)
        with self._pulse.computing("layers", len(rows), self._runner.num_layers):
            run.advance(self._runner.num_layers)
            return run.finish()

    def await_output(self, output: StepOutput, tokens: int) -> None:
        """Waits until a pass of `tokens` tokens has ended."""
        with self._pulse.computing("end", tokens):
            output.done.synchronize()

    def forward(
        self,
        rows: list[Row],
        n_decode: int,
        should_yield: Callable[[], bool] | None = None,
        joined: Joined | None = None,
    ) -> StepOutput | None:
        """Computes a pass without recording results, waits for its output, and returns it.

        Returns None if `should_yield` returned True, which ends the pass. It is called before the pass and, on a CPU,
        before each layer.
        """
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
        except (RuntimeError, MemoryError):  # out of memory, perhaps: free it for the next pass
            run.abort().synchronize()
            raise
        return output
