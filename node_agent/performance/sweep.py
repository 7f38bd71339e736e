"""Measures passes on a node's real runner, with synthetic adapters in its adapter memory, while the node serves
nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from adapters.base_model import BaseModel
from cluster.messages import Sampling
from cluster.performance_fit import DecodeSample, PrefillSample
from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.loop import Engine
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.leases import Lease
from node_agent.performance.cases import Bounds, Case, Effort, decode_cases, prefill_cases, row_contexts
from node_agent.performance.repeats import GaveWay, Progress, SweepTooSlow, passes
from node_agent.performance.terms import decode_sample, prefill_sample
from node_agent.types import GROUPS

TARGETS = GROUPS["qkv"]
"""Projections that synthetic adapters adapt, as in the papers."""
FILL_TOKENS = 64

Run = DecodeSample | PrefillSample


@dataclass
class Sweep:
    """Samples of a sweep: the measured decode and prompt passes."""

    decode: list[DecodeSample] = field(default_factory=list)
    prefill: list[PrefillSample] = field(default_factory=list)


@dataclass(eq=False)
class Bench:
    """Rows and synthetic adapters that an idle engine lends for running cases. Created by `bench`."""

    engine: Engine
    requests: list[Request]
    leases: list[Lease]
    bounds: Bounds
    deadline: float
    should_yield: Callable[[], bool] | None

    def run(self, case: Case) -> Run:
        """Runs one pass and returns its sample, timed like the engine's hot passes. Raises GaveWay when the engine has
        other work."""
        rows = []
        for request, row in zip(self.requests, case.rows, strict=False):
            request.computed = row.context
            request.lease = self.leases[row.adapter] if row.adapter >= 0 else None
            request.tokens = [1] * (row.context + row.length)
            rows.append(Row(request, row.length))
        rows.sort(key=lambda row: -1 if row.request.lease is None else row.request.lease.slot)
        started_at = time.perf_counter()
        self._forward(rows, len(rows) if case.decode else 0)
        seconds = time.perf_counter() - started_at
        return decode_sample(rows, seconds) if case.decode else prefill_sample(rows, seconds)

    def _forward(self, rows: list[Row], n_decode: int) -> None:
        if self.engine.hot.forward(rows, n_decode, self.should_yield) is None:
            raise GaveWay

    def fill(self, written: set[int], progress: Progress) -> None:
        """Writes to every row's part of the cache. Memory that was never written would be read faster, since all its
        pages are one page of zeros.

        Skips blocks in `written`, and adds the others to it. Raises SweepTooSlow and GaveWay.
        """
        size = self.engine.blocks.block_tokens
        for i, (request, context) in enumerate(zip(self.requests, self.bounds.contexts, strict=True)):
            progress("writing the cache", i / len(self.requests))
            request.lease = None
            for begin in range(0, context, FILL_TOKENS):
                length = min(FILL_TOKENS, context - begin)
                blocks = request.blocks[begin // size : -(-(begin + length) // size)]
                if written.issuperset(blocks):
                    continue
                if time.monotonic() > self.deadline:
                    raise SweepTooSlow(f"writing {begin} tokens of {i + 1} rows used up the time limit")
                request.computed, request.tokens = begin, [1] * (begin + length)
                self._forward([Row(request, length)], 0)
                written.update(blocks)

    def measure(self, cases: Sequence[Case], rounds: int, progress: Progress = lambda *_: None) -> Sweep:
        """Measures all cases, once per round, and returns the samples. The order differs between rounds, so that
        disturbances affect different cases.

        The first pass of a case is a warm-up, and is dropped if there are more. Stops at the deadline; raises
        SweepTooSlow if fewer than half of the cases were measured by then.
        """
        runs: dict[Case, list[Run]] = {}
        order = passes(cases, rounds)
        for at, case in enumerate(order):
            if time.monotonic() > self.deadline:
                return sweep_of(runs, len(cases))
            progress("measuring passes", at / len(order))
            runs.setdefault(case, []).append(self.run(case))
        return sweep_of(runs, len(cases))


def sweep_of(runs: Mapping[Case, list[Run]], cases: int, fastest: float = 1.0) -> Sweep:
    """Returns the samples to use: of each case, the `fastest` share of its passes, without the first unless it is the
    only one. Raises SweepTooSlow if fewer than half of `cases` have any."""
    if len(runs) < cases / 2:
        raise SweepTooSlow(f"{len(runs)} of {cases} passes used up the time limit")
    sweep = Sweep()
    for of_case in runs.values():
        counted = sorted(of_case[1:] or of_case, key=lambda run: run.seconds)
        for sample in counted[: math.ceil(fastest * len(counted))]:
            if isinstance(sample, DecodeSample):
                sweep.decode.append(sample)
            else:
                sweep.prefill.append(sample)
    return sweep


@contextmanager
def bench(
    engine: Engine,
    base: BaseModel,
    effort: Effort,
    progress: Progress = lambda *_: None,
    budget: float = float("inf"),
    *,
    should_yield: Callable[[], bool] | None = None,
    written: set[int] | None = None,
    targets: Sequence[int] = TARGETS,
) -> Iterator[Bench]:
    """Yields a bench: rows with written parts of the KV cache, and as many synthetic adapters as fit. Frees everything
    at the end. The engine must serve nothing.

    `effort`: its `ranks` are those of the adapters. `budget`: seconds for writing and measuring, after which
    SweepTooSlow is raised. `written`: numbers of cache blocks already written, to which the bench adds. `targets`:
    projections that the adapters adapt. Raises GaveWay when the engine has other work.
    """
    limits, blocks = engine.limits, engine.blocks
    free = blocks.free * blocks.block_tokens
    contexts = row_contexts(effort, limits.max_rows, limits.max_context, free, blocks.block_tokens)
    requests = []
    with lent_adapters(engine.store, base, effort.ranks, len(contexts), should_yield, targets=targets) as leases:
        bounds = Bounds(limits.chunk_tokens, tuple(contexts), tuple(max(lease.ranks) for lease in leases))
        deadline = time.monotonic() + budget
        try:
            for i, context in enumerate(contexts):
                request = Request(f"bench-{i}", "", [1], 1, Sampling(temperature=0.0), 0.0, None, ignore_eos=True)
                allocated = blocks.allocate(blocks.blocks_for(context))
                assert allocated is not None  # the rows' parts fit in the free blocks
                request.blocks = allocated
                requests.append(request)
            timed = Bench(engine, requests, leases, bounds, deadline, should_yield)
            timed.fill(set() if written is None else written, progress)
            yield timed
        finally:
            for request in reversed(requests):  # in reverse, so that each row gets the same blocks next time
                blocks.release(request.blocks)


@contextmanager
def lent_adapters(
    store: AdapterStore,
    base: BaseModel,
    ranks: Sequence[int],
    each: int,
    should_yield: Callable[[], bool] | None = None,
    *,
    targets: Sequence[int] = TARGETS,
) -> Iterator[list[Lease]]:
    """Allocates up to `each` synthetic adapters of each rank, alternating ranks, while there is room, and yields their
    leases. They evict idle adapters only without `should_yield`, so that callers' adapters stay. Raises GaveWay."""
    layouts = {rank: store.pool.uniform_layout(base, rank, targets) for rank in ranks}
    leases: list[Lease] = []
    try:
        for number in range(each):
            for rank in ranks:
                if should_yield is not None and should_yield():
                    raise GaveWay
                lease = store.lend(f"lent-{rank}-{number}", layouts[rank], evicts=should_yield is None)
                if lease is not None:
                    leases.append(lease)
        yield leases
    finally:
        for lease in leases:
            store.release(lease, ())
            store.discard(lease.digest)


def all_cases(effort: Effort, bounds: Bounds, seed: int = 0) -> list[Case]:
    """Returns all cases of a sweep: decode passes, then prompt passes."""
    return [*decode_cases(effort, bounds, seed), *prefill_cases(effort, bounds)]
