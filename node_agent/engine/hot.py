"""The hot pass: what the batch computes in an iteration. On a CPU it can stand still between two layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from node_agent.device import Event, unless_out_of_memory
from node_agent.engine.batch import Row
from node_agent.engine.pass_size import PassSize
from node_agent.engine.pulse import Pulse
from node_agent.engine.request import Request
from node_agent.types import ModelRunner, Pass, PassLora, StepBatch, StepOutput

Tensors = Callable[[list[Row], int], tuple[StepBatch, PassLora | None]]
Book = Callable[[list[Row], StepOutput], None]
Observe = Callable[[list[Row], int, float], None]
Fail = Callable[[Row], None]


@dataclass(eq=False)
class HotPass:
    """Its first `n_decode` rows decode. As an event it ends when nothing of it is computed any more."""

    rows: list[Row]
    n_decode: int
    run: Pass
    seconds: float
    """that it was computed, without those in which it stood still"""
    dropped: int = 0
    """rows that nobody wants any more"""
    ended: bool = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        """Raises RuntimeError while the pass stands still: only the engine's thread could end it."""
        if not self.ended:
            raise RuntimeError("a hot pass that stands still can't be waited for")

    def wait(self) -> None:
        """As `synchronize`."""
        self.synchronize()


class HotPasses:
    """One at a time is open."""

    def __init__(
        self, runner: ModelRunner, tensors: Tensors, book: Book, observe: Observe, fail: Fail, pulse: Pulse
    ) -> None:
        """`book` is told what an ended pass computed, `observe` how many seconds it took, `fail` of a row for which
        there is too little memory even alone."""
        self.runner, self._tensors, self._book, self._observe = runner, tensors, book, observe
        self._fail, self._pulse, self._size = fail, pulse, PassSize()
        self.can_pause = runner.device.type == "cpu"
        """elsewhere a pass is enqueued as a whole: nothing overtakes what the device has been given"""
        self.open: HotPass | None = None

    def begin(self, rows: list[Row], n_decode: int) -> None:
        """As many of the rows as there has been memory for lately."""
        begun = time.perf_counter()
        rows, n_decode = self._size.cut(rows, n_decode)
        run = unless_out_of_memory(lambda: self.runner.start(*self._tensors(rows, n_decode)))
        if run is None:
            self._shrink(rows)
            return
        self.open = HotPass(rows, n_decode, run, time.perf_counter() - begun)
        for row in rows:
            row.request.in_hot_pass = True

    def advance(self) -> bool:
        """By one layer, where it can stand still after it. False: there is no open pass any more."""
        hot = self.open
        if hot is None:
            return False
        begun, layers = time.perf_counter(), self.runner.num_layers
        tokens, to_layer = sum(row.length for row in hot.rows), hot.run.layer + 1 if self.can_pause else layers
        output = unless_out_of_memory(lambda: self._advance(hot.run, tokens, to_layer))
        hot.seconds += time.perf_counter() - begun
        if output is None:
            self._end(hot)
            hot.run.abort().synchronize()
            self._shrink(hot.rows)
            return False
        if isinstance(output, bool):
            return True
        self._end(hot)
        self._size.grow()
        self._observe(hot.rows, hot.n_decode, hot.seconds)
        self._book(hot.rows, output)
        return False

    def compute(self, rows: list[Row]) -> None:
        """A whole pass of prompts alone, while the open one stands still."""
        begun = time.perf_counter()
        rows, _ = self._size.cut(rows, 0)
        output = unless_out_of_memory(lambda: self.forward(rows, 0))
        if output is None:  # for want of memory: it gives way to nobody
            self._shrink(rows)
            return
        self._observe(rows, 0, time.perf_counter() - begun)
        self._book(rows, output)

    def forward(self, rows: list[Row], n_decode: int, gives_way: Callable[[], bool] | None = None) -> StepOutput | None:
        """A whole pass of which nothing is booked. Returns when its tokens are there; or None when `gives_way`, asked
        before it and, where a pass can stand still, before each layer, has ended it."""
        run, layers = self.runner.start(*self._tensors(rows, n_decode)), self.runner.num_layers
        tokens = sum(row.length for row in rows)
        for layer in range(1, layers + 1) if gives_way is not None and self.can_pause else (layers,):
            if gives_way is not None and gives_way():
                run.abort().synchronize()
                return None
            self._compute(run, tokens, layer)
        return self._finish(run, tokens)

    def _advance(self, run: Pass, tokens: int, to_layer: int) -> StepOutput | bool:
        """False: there are more layers."""
        self._compute(run, tokens, to_layer)
        return self._finish(run, tokens) if to_layer == self.runner.num_layers else False

    def _shrink(self, rows: list[Row]) -> None:
        """There was no memory for a pass of the rows. They are computed in smaller ones, as nothing of it counts; a
        single token that is too much ends its request."""
        tokens = sum(row.length for row in rows)
        self._size.shrink(tokens)
        if tokens == 1:
            self._fail(rows[0])

    def _compute(self, run: Pass, tokens: int, to_layer: int) -> None:
        with self._pulse.computing("layers", tokens, to_layer - run.layer):
            run.advance(to_layer)

    def _finish(self, run: Pass, tokens: int) -> StepOutput:
        with self._pulse.computing("end", tokens):
            output = run.finish()
            output.done.synchronize()
        return output

    def drop(self, request: Request) -> list[Event]:
        """Nobody wants the request's row any more. What it holds is free at the events."""
        hot = self.open
        if hot is None or not request.in_hot_pass:
            return []
        request.in_hot_pass = False
        hot.dropped += 1
        if hot.dropped < len(hot.rows):
            return [hot]
        self._end(hot)
        return [hot.run.abort()]

    def _end(self, hot: HotPass) -> None:
        self.open, hot.ended = None, True
        for row in hot.rows:
            row.request.in_hot_pass = False
