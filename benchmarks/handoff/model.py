"""A model of the handoff, fitted to what was measured: what more workers than this host has cores for would take.

An empty round trip takes fixed + per_worker * workers + per_byte * bytes of x; a slice takes what one worker's takes
(profile.CpuLora). Where only one number of workers was measured, per_worker is the engine's own work for one more of
them, measured without workers: the engine answers itself. What workers share, such as the memory's bandwidth and the
caches, is in neither, so that predictions for many are bounds from below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cluster.least_squares import nonnegative
from kernels.handoff import Flags
from node_agent.coldstart.keeper import WorkerState
from node_agent.coldstart.measure import fit_cpu
from node_agent.coldstart.profile import CpuLora
from node_agent.coldstart.shared import DTYPES, Layout
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.workers import WorkerPool
from tests.support.host_case import HostCase

PREDICTED = (2, 4, 8, 16)
"""Numbers of workers, as far as they are not measured."""


class SelfAnswered:
    """Flags of a pool without workers: what is posted is answered at once."""

    def __init__(self, flags: Flags, to_done: int) -> None:
        """`to_done`: bytes from a command flag to its done flag."""
        self._flags, self._to_done, self.wait, self.next = flags, to_done, flags.wait, flags.next

    def post(self, flag: int, value: int) -> None:
        self._flags.post(flag, value)
        self._flags.post(flag + self._to_done, value)


class EngineAlone(WorkerPool):
    """The engine's side of handoffs to a number of workers that do not exist."""

    def __init__(self, case: HostCase, workers: int, tokens: int) -> None:
        layout = Layout(2, workers, tokens, case.widths, DTYPES.index(case.host.torch_dtype))
        super().__init__(case.host, layout, range(workers))
        self._alone = [WorkerState(i, 1, None, -1, 0.0) for i in range(workers)]  # type: ignore[arg-type]
        self.arm()
        self._flags = SelfAnswered(self._flags, layout.done_flag(0, 0) - layout.command_flag(0, 0))

    @property
    def available(self) -> list[WorkerState]:
        return self._alone


def engine_us_per_worker(case: HostCase, time_of: Callable[[Callable[[], None]], float]) -> float:
    """Returns the microseconds that the engine works for each further worker of a handoff. `time_of` times a call."""
    us_by_workers = {}
    for workers in (1, 9):
        pool = EngineAlone(case, workers, 16)
        x = torch.zeros(16, case.widths[0][0], dtype=case.host.torch_dtype)

        def call(pool: WorkerPool = pool, x: torch.Tensor = x) -> None:
            handoff = pool.open(x, [Segment(0, 16, 1)], 0, None)
            assert handoff is not None and handoff.wait()
            handoff.close()

        us_by_workers[workers] = time_of(call)
        pool.close()
    return (us_by_workers[9] - us_by_workers[1]) / 8


@dataclass(frozen=True)
class HandoffModel:
    """Microseconds."""

    fixed: float
    per_worker: float
    per_byte: float
    slice: CpuLora
    """cost of a slice, in seconds"""

    def roundtrip(self, workers: int, size: int) -> float:
        return self.fixed + self.per_worker * workers + self.per_byte * size

    def pinned(self, workers: int, size: int, tokens: int, elements: int) -> float:
        tokens_of_worker, cpu = -(-tokens // workers), self.slice
        work = cpu.fixed + elements * (cpu.per_element + tokens_of_worker * cpu.per_product)
        return self.roundtrip(workers, size) + work * 1e6


def fit(rows: Sequence[dict[str, Any]], per_worker_us: float) -> HandoffModel:
    """Least squares of relative errors over the medians of measured rows. `per_worker_us` stands where all rows have
    the same number of workers."""
    empty = np.array([row["roundtrip_p50_us"] for row in rows])
    counts, sizes = (np.array([row[name] for row in rows], float) for name in ("workers", "bytes"))
    if len(set(counts)) > 1:
        columns = np.stack([np.ones(len(rows)), counts, sizes], 1)
        fixed, per_worker, per_byte = nonnegative(columns / empty[:, None], np.ones(len(rows)))
    else:
        per_worker, rest = per_worker_us, np.maximum(empty - per_worker_us * counts, 0.0)
        columns = np.stack([np.ones(len(rows)), sizes], 1)
        fixed, per_byte = nonnegative(columns / empty[:, None], rest / empty)
    samples = [
        (-(-row["tokens"] // row["workers"]), row["elements"], (row["pinned_p50_us"] - row["roundtrip_p50_us"]) * 1e-6)
        for row in rows
        if row["pinned_p50_us"] > row["roundtrip_p50_us"]
    ]
    return HandoffModel(float(fixed), float(per_worker), float(per_byte), fit_cpu(samples))


def predictions(model: HandoffModel, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each number of workers that was not measured, marked as predicted."""
    measured = {row["workers"] for row in rows}
    cases = {(row["width"], row["tokens"]): row for row in rows}
    return [
        {
            "predicted": True,
            "width": width,
            "tokens": tokens,
            "workers": workers,
            "roundtrip_us": model.roundtrip(workers, row["bytes"]),
            "pinned_us": model.pinned(workers, row["bytes"], tokens, row["elements"]),
        }
        for (width, tokens), row in cases.items()
        for workers in PREDICTED
        if workers not in measured and workers <= tokens
    ]


def worst_error(model: HandoffModel, rows: Sequence[dict[str, Any]]) -> float:
    """Returns the largest relative error of the model's pinned time over the measured rows."""
    errors = [
        model.pinned(row["workers"], row["bytes"], row["tokens"], row["elements"]) / row["pinned_p50_us"] - 1
        for row in rows
    ]
    return float(max(map(abs, errors)))
