"""The hot pass: what the batch computes in an iteration. On a CPU it can stand still between two layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from node_agent.device import Event
from node_agent.engine.batch import Row
from node_agent.engine.request import Request
from node_agent.types import ModelRunner, Pass, PassLora, StepBatch, StepOutput

Tensors = Callable[[list[Row], int], tuple[StepBatch, PassLora | None]]
Book = Callable[[list[Row], StepOutput], None]
Observe = Callable[[list[Row], int, float], None]


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

    def __init__(self, runner: ModelRunner, tensors: Tensors, book: Book, observe: Observe) -> None:
        """`book` is told what an ended pass computed, `observe` how many seconds it took."""
        self.runner, self._tensors, self._book, self._observe = runner, tensors, book, observe
        self.can_pause = runner.device.type == "cpu"
        """elsewhere a pass is enqueued as a whole: nothing overtakes what the device has been given"""
        self.open: HotPass | None = None

    def begin(self, rows: list[Row], n_decode: int) -> None:
        begun = time.perf_counter()
        run = self.runner.start(*self._tensors(rows, n_decode))
        self.open = HotPass(rows, n_decode, run, time.perf_counter() - begun)
        for row in rows:
            row.request.in_hot_pass = True

    def advance(self) -> bool:
        """By one layer, where it can stand still after it. False: there is no open pass any more."""
        hot = self.open
        if hot is None:
            return False
        begun, layers = time.perf_counter(), self.runner.num_layers
        hot.run.advance(hot.run.layer + 1 if self.can_pause else layers)
        output = None
        if hot.run.layer == layers:
            output = hot.run.finish()
            output.done.synchronize()
        hot.seconds += time.perf_counter() - begun
        if output is None:
            return True
        self._end(hot)
        self._observe(hot.rows, hot.n_decode, hot.seconds)
        self._book(hot.rows, output)
        return False

    def compute(self, rows: list[Row]) -> None:
        """A whole pass of prompts alone, while the open one stands still."""
        begun = time.perf_counter()
        output = self.forward(rows, 0)
        assert output is not None  # it gives way to nobody
        self._observe(rows, 0, time.perf_counter() - begun)
        self._book(rows, output)

    def forward(self, rows: list[Row], n_decode: int, gives_way: Callable[[], bool] | None = None) -> StepOutput | None:
        """A whole pass of which nothing is booked. Returns when its tokens are there; or None when `gives_way`, asked
        before it and, where a pass can stand still, before each layer, has ended it."""
        run, layers = self.runner.start(*self._tensors(rows, n_decode)), self.runner.num_layers
        for layer in range(1, layers + 1) if gives_way is not None and self.can_pause else (layers,):
            if gives_way is not None and gives_way():
                run.abort().synchronize()
                return None
            run.advance(layer)
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
