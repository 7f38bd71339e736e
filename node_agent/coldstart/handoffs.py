"""Handoffs of one cold pass: their common interface, and the implementation for an engine on a CPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from node_agent.coldstart.keeper import WorkerState
from node_agent.coldstart.slices import Segment

WAIT_LIMIT_S = 1.0
"""Maximum seconds to wait for a worker's answer. Computing a slice takes about a hundredth of it."""


@dataclass(slots=True, eq=False)
class Part:
    """Part of a handoff that one worker computes: a slice of its tokens, or a share of the weights for all its
    tokens."""

    worker: WorkerState
    flag: int
    """memory address of the done flag, which the worker sets to `value` when it has answered"""
    value: int
    at: int
    """index of the part's command among the worker's commands in the shared memory"""
    begin: int
    """first token of the slice; all tokens of the handoff if workers split the weights"""
    end: int


class HandoffPool(Protocol):
    """Part of a WorkerPool that handoffs use."""

    takeover_ns: int

    def open(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, group: str | None) -> Handoff | None: ...

    def await_part(self, part: Part, end_ns: int) -> bool: ...

    def take_over(self, parts: Sequence[Part]) -> Handoff | None: ...

    def reads(self, parts: Iterable[Part]) -> bool: ...

    def release(self, slot: int, parts: list[Part], arrived: bool) -> None: ...

    def record_timeout(self) -> None: ...


class PassHandoffs(Protocol):
    """Handoffs of one cold pass. The implementation differs between a CPU and a GPU (stream.py)."""

    @property
    def failed(self) -> bool:
        """Returns whether a worker has not answered a handoff. On a GPU this is certain only once the pass has
        ended."""

    def open(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, group: str | None) -> Any:
        """Opens a handoff as `WorkerPool.open` does. Returns an object with `wait`, `outputs` and `close`; None if no
        worker can take it."""

    def end(self) -> None:
        """Declares that the pass opens no more handoffs. `quiet` becomes True once no worker reads any of the pass's
        handoffs."""

    @property
    def quiet(self) -> bool:
        """Returns whether the pass has ended and no worker reads anything for it, as of the last `poll`."""


class HostPass:
    """Handoffs of one cold pass of an engine on a CPU. The caller waits for each handoff, and so learns when it
    fails."""

    failed = False

    def __init__(self, pool: HandoffPool) -> None:
        self._pool = pool
        self._opened: list[Handoff] = []
        self._ended = False

    def open(self, x: torch.Tensor, segments: Sequence[Segment], layer: int, group: str | None) -> Handoff | None:
        handoff = self._pool.open(x, segments, layer, group)
        if handoff is not None:
            self._opened.append(handoff)
        return handoff

    def end(self) -> None:
        self._ended, self._opened = True, [handoff for handoff in self._opened if not handoff.answered]

    @property
    def quiet(self) -> bool:
        return self._ended and not any(self._pool.reads(handoff.parts) for handoff in self._opened)


class Handoff:
    """LoRA term of one projection group that workers are computing. If a worker exits or does not answer, another one
    computes its slice; if none is free, the handoff fails."""

    def __init__(self, pool: HandoffPool, slot: int, parts: list[Part], outputs: list[torch.Tensor]) -> None:
        """`outputs`: views [T, d_out] of the slot's y area, one for each projection. The workers write their results to
        them."""
        self._pool, self._slot, self._parts, self._views = pool, slot, parts, outputs
        self._outputs = outputs
        self._arrived: bool | None = None
        self._open = True
        self._stand_ins: list[Handoff] = []
        self.answered = False
        """whether all workers of this handoff have answered"""

    @property
    def parts(self) -> list[Part]:
        """Returns the handoff's parts, including those that another worker computes in place of a late one."""
        return [*self._parts, *(part for stand_in in self._stand_ins for part in stand_in.parts)]

    def wait(self, timeout: float = WAIT_LIMIT_S) -> bool:
        """Waits up to `timeout` seconds until all slices have arrived, and returns whether they have. Returns False at
        once if a worker has exited and none can replace it. Later calls return the same result."""
        if self._arrived is None:
            begin_ns, await_part = time.monotonic_ns(), self._pool.await_part
            first_ns = begin_ns + min(int(timeout * 1e9), self._pool.takeover_ns)
            missing = [part for part in self._parts if not await_part(part, first_ns)]
            self.answered = not missing
            self._arrived = self.answered or self._complete(missing, begin_ns + int(timeout * 1e9))
        return self._arrived

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Outputs [T, d_out] of each projection. Valid after a successful `wait`, until `close`."""
        if not (self._arrived and self._open):
            raise RuntimeError("a handoff's outputs can be read only between a successful `wait` and `close`")
        return self._outputs

    def close(self) -> None:
        """Ends the use of `outputs`. If workers have not answered yet, the handoff is abandoned."""
        if self._open:
            self._open = False
            self._outputs = self._views = []
            self._pool.release(self._slot, self._parts, self.answered)

    def _await_own(self, end_ns: int) -> bool:
        """Waits until `end_ns` for this handoff's workers, without replacing any: it may itself be the replacement.
        Returns whether all have answered."""
        self.answered = self._arrived = all(self._pool.await_part(part, end_ns) for part in self._parts)
        return self.answered

    def _complete(self, missing: list[Part], end_ns: int) -> bool:
        """Waits for the missing slices, and replaces their workers. Returns whether all arrive before `end_ns`
        (monotonic nanoseconds)."""
        self._outputs = [y.clone() for y in self._views]  # a stalled worker may write to the views when it wakes
        slices: dict[tuple[int, int], list[Part]] = {}
        for part in missing:
            slices.setdefault((part.begin, part.end), []).append(part)
        arrived = all(self._complete_slice(parts, end_ns) for parts in slices.values())
        if not arrived and time.monotonic_ns() >= end_ns:
            self._pool.record_timeout()
        return arrived

    def _complete_slice(self, parts: Sequence[Part], end_ns: int) -> bool:
        """Obtains one slice, of which `parts` are missing. Another worker computes the whole slice if one is free.
        Returns whether it arrived before `end_ns`."""
        begin, end = parts[0].begin, parts[0].end
        stand_in = self._pool.take_over(parts) if time.monotonic_ns() < end_ns else None
        rows: Sequence[torch.Tensor]
        if stand_in is None:
            arrived = all(self._pool.await_part(part, end_ns) for part in parts)
            rows = [y[begin:end] for y in self._views]
        else:
            self._stand_ins.append(stand_in)
            arrived = stand_in._await_own(end_ns)
            rows = stand_in.outputs if arrived else ()
        if arrived:
            for y, computed in zip(self._outputs, rows, strict=True):
                y[begin:end] = computed
        if stand_in is not None:
            stand_in.close()
        return arrived
