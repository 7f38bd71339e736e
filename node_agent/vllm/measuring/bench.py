"""Runs cases through vLLM while the node serves nothing: the engine's thread gives vLLM dummy requests, and reads when
their steps ended. Other outputs of vLLM are handed to the engine."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import fmean, median

from cluster.performance_fit import TransferSample
from node_agent.performance.idle_base import MeasurementFailed
from node_agent.performance.repeats import GaveWay
from node_agent.vllm.driver import AdapterLoaded, NewTokens, RequestFailed
from node_agent.vllm.engine import VllmDied, VllmEngine
from node_agent.vllm.measuring.cases import (
    SPARE_TOKENS,
    STEPS,
    DummyAdapter,
    GrowingBatch,
    PlannedRow,
    PromptPass,
    Room,
)
from node_agent.vllm.measuring.dummies import DummyFolders
from node_agent.vllm.measuring.samples import DecodeRun, PrefillRun, Runs

FIRST_NUMBER = 1 << 29
"""vLLM's number of the first dummy adapter. Adapters of requests have smaller ones, those of the start's check larger
ones."""
POLL_S = 0.002
"""Seconds between two looks for what vLLM has done, and for a message to the engine."""
MIN_SLOTS = 2
"""Number of slots that a measurement needs, so that batches of one and of several adapters differ."""


class _Row:
    """Dummy request that vLLM computes."""

    def __init__(self, id: str, plan: PlannedRow) -> None:
        self.id, self.plan = id, plan
        self.scheduled = 0.0
        self.cached = 0
        self.ends: list[float | None] = []
        """end of the step of each token, in seconds of vLLM's clock; None for tokens that came with a later one"""
        self.ended = False

    def take(self, output: NewTokens) -> None:
        if output.times is None:
            raise MeasurementFailed("this vLLM does not say when it computes tokens")
        if not self.ends:
            self.scheduled, self.cached = output.times.scheduled, output.cached_tokens
        self.ends += [None] * (len(output.token_ids) - 1) + [output.times.ended]
        self.ended = output.finished

    def context_at(self, at: float) -> int:
        """Returns the tokens in the cache before the step that ended at this time."""
        return self.plan.context + self.plan.length + self.ends.index(at) - 1

    @property
    def rank(self) -> int:
        return self.plan.adapter.rank if self.plan.adapter is not None else 0


class Bench:
    """Rows, slots and KV blocks of vLLM that a measurement uses. Made by `bench`."""

    def __init__(self, engine: VllmEngine, folders: DummyFolders, runs: Runs, should_yield: Callable[[], bool]) -> None:
        """`runs`: where the times are noted. `should_yield`: whether the engine has other work."""
        self._engine, self._folders, self.runs, self._should_yield = engine, folders, runs, should_yield
        self._driver, self._types, self._patience = engine.driver, engine.types, engine.answer_s
        self._rows: dict[str, _Row] = {}
        self._loaded: dict[DummyAdapter, int] = {}
        self._loading: AdapterLoaded | None = None
        self._draw = random.Random(time.monotonic_ns())
        self._number, self._requests = FIRST_NUMBER, 0

    def measure(self, case: GrowingBatch | PromptPass) -> None:
        """Runs one case. Raises GaveWay, MeasurementFailed and VllmDied."""
        self._hold(case.adapters)
        try:
            if isinstance(case, GrowingBatch):
                self._grow(case)
            else:
                self._compute_prompts(case)
        finally:
            self._drop_rows()

    def close(self) -> None:
        """Takes all requests and adapters from vLLM. Later orders are carried out after that."""
        self._drop_rows()
        for number in self._loaded.values():
            self._driver.remove_adapter(number)
        self._loaded.clear()

    # --- cases

    def _grow(self, case: GrowingBatch) -> None:
        decoded, rows = SPARE_TOKENS * len(case.sizes), list[_Row]()
        for size in case.sizes:
            rows += [self._start(plan, decoded) for plan in case.rows[len(rows) : size]]
            self._until(partial(_are_timed, rows))
            steps = _common_steps(rows)
            if len(steps) < STEPS:
                return  # a request that joined early has no tokens left
            adapters = {row.plan.adapter for row in rows if row.plan.adapter is not None}
            run = DecodeRun(
                contexts=round(fmean(sum(row.context_at(end) for row in rows) for _, end in steps)),
                ranks=tuple(row.rank for row in rows),
                adapter_ranks=tuple(sorted(adapter.rank for adapter in adapters)),
                seconds=median(end - begin for begin, end in steps),
            )
            self.runs.decode.setdefault((case, size), []).append(run)

    def _compute_prompts(self, case: PromptPass) -> None:
        """Several prompts come while vLLM computes another, so that it takes them into one pass."""
        salt = self._salt()
        for plan in case.rows:
            if plan.context:
                filler = self._start(PlannedRow(0, plan.context, plan.adapter), 1, salt)
                self._until(partial(_have_ended, [filler]))
        blocker = self._start(PlannedRow(0, 1, None), 1) if len(case.rows) > 1 else None
        rows = [self._start(plan, 1, salt) for plan in case.rows]
        self._until(partial(_have_ended, rows if blocker is None else [blocker, *rows]))
        if blocker is not None and blocker.ends[:1] == rows[0].ends[:1]:
            rows.append(blocker)  # it was computed in their pass
        ends, begin = {row.ends[0] for row in rows}, max(row.scheduled for row in rows)
        if blocker is not None and blocker not in rows and blocker.ends[0] is not None:
            begin = max(begin, blocker.ends[0])
        end = ends.pop()
        if end is not None and end > begin and not ends:  # otherwise they were computed in several passes
            chunks = tuple((row.cached, row.plan.context + row.plan.length, row.rank) for row in rows)
            self.runs.prefill.setdefault(case, []).append(PrefillRun(chunks, end - begin))

    # --- requests and adapters

    def _start(self, plan: PlannedRow, max_tokens: int, salt: str = "") -> _Row:
        self._requests += 1
        row = _Row(f"garnish-bench-{self._requests}-{self._draw.getrandbits(32):x}", plan)
        draw = random.Random(salt) if salt else self._draw  # with a salt, prompts begin alike
        ids = [draw.randrange(self._engine.limits.vocab_size) for _ in range(plan.context + plan.length)]
        parameters = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        adapter = None
        if plan.adapter is not None:
            number = self._loaded[plan.adapter]
            adapter = self._types.adapter(f"garnish-bench-{number}", number, self._folders.folder(plan.adapter.rank))
        self._rows[row.id] = row
        prompt = self._types.prompt(ids, salt or self._salt())
        self._driver.generate(row.id, prompt, self._types.parameters(parameters, ()), adapter)
        return row

    def _salt(self) -> str:
        """Returns a salt that no other prompt has, so that nothing of it is found in the prefix cache."""
        return f"garnish-bench-{self._draw.getrandbits(64):x}"

    def _drop_rows(self) -> None:
        """Ends all dummy requests, and waits until vLLM knows."""
        orders = [self._driver.abort(row.id) for row in self._rows.values() if not row.ended]
        deadline = time.monotonic() + self._patience
        while not all(order.query() for order in orders):
            if time.monotonic() > deadline:
                raise VllmDied("vLLM does not take the end of a request")
            time.sleep(POLL_S)
        self._rows.clear()

    def _hold(self, adapters: frozenset[DummyAdapter]) -> None:
        """Loads these dummy adapters, in the place of others."""
        for adapter in [each for each in self._loaded if each not in adapters]:
            self._driver.remove_adapter(self._loaded.pop(adapter))
        for adapter in sorted(adapters - self._loaded.keys(), key=lambda each: (each.rank, each.number)):
            self._load(adapter)

    def _load(self, adapter: DummyAdapter) -> None:
        try:
            folder = self._folders.folder(adapter.rank)
        except OSError as error:
            raise MeasurementFailed(f"a dummy adapter can't be written: {error}") from None
        self._number, self._loading = self._number + 1, None
        number = self._loaded[adapter] = self._number
        self._driver.add_adapter(number, self._types.adapter(f"garnish-bench-{number}", number, folder))
        self._until(lambda: self._loading is not None)
        assert self._loading is not None
        if self._loading.failure:
            del self._loaded[adapter]
            raise MeasurementFailed(f"vLLM does not take a dummy adapter: {self._loading.failure}")
        self.runs.loads.append(TransferSample(self._folders.size(adapter.rank), self._loading.seconds))

    # --- what vLLM does

    def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition. Raises GaveWay if the engine has other work, and VllmDied if vLLM is silent."""
        since = time.monotonic()
        while True:
            self._take()
            if condition():
                return
            if self._should_yield():
                raise GaveWay
            silent = time.monotonic() - max(since, self._driver.last_sign)
            if silent > self._patience:
                self._rows.clear()  # nobody would take their ends
                raise VllmDied(f"vLLM has not answered a measurement for {silent:.0f} s")
            time.sleep(POLL_S)

    def _take(self) -> None:
        for output in self._driver.take():
            if isinstance(output, NewTokens) and output.id in self._rows:
                self._rows[output.id].take(output)
            elif isinstance(output, RequestFailed) and output.id in self._rows:
                self._rows.pop(output.id)
                raise MeasurementFailed(f"vLLM refused a dummy request: {output.reason}")
            elif isinstance(output, AdapterLoaded) and output.number > FIRST_NUMBER:
                if output.number == self._number:
                    self._loading = output
            else:
                self._engine.take_output(output)


@contextmanager
def bench(
    engine: VllmEngine, folders: DummyFolders, runs: Runs, should_yield: Callable[[], bool] = lambda: False
) -> Iterator[Bench]:
    """Yields a bench of an engine that serves nothing. At the end vLLM has no dummies any more."""
    created = Bench(engine, folders, runs, should_yield)
    try:
        yield created
    finally:
        created.close()


def room_of(engine: VllmEngine) -> Room:
    """Returns the room for a measurement. While fewer than MIN_SLOTS slots are free, adapters that are worth least go
    back to host memory."""
    slots, limits = engine.store.free_slots(MIN_SLOTS), engine.limits
    return Room(
        max_rows=limits.max_rows,
        max_context=limits.max_context,
        chunk_tokens=limits.chunk_tokens,
        kv_blocks=engine.blocks.free,
        block_tokens=engine.blocks.block_tokens,
        slots=slots,
        max_rank=engine.store.limits.max_rank,
        caches_prefixes=limits.prefix_cache,
    )


def _have_ended(rows: Sequence[_Row]) -> bool:
    return all(row.ended for row in rows)


def _are_timed(rows: Sequence[_Row]) -> bool:
    """Returns whether enough steps of these rows are timed, or no more will be."""
    return len(_common_steps(rows)) >= STEPS or any(row.ended for row in rows)


def _common_steps(rows: Sequence[_Row]) -> list[tuple[float, float]]:
    """Returns the begin and end of each step in which all rows decoded, as they did in the step before."""
    counts = Counter(at for row in rows for at in row.ends if at is not None)
    ends = sorted(counts)
    return [(begin, end) for begin, end in pairwise(ends) if counts[begin] == counts[end] == len(rows)]
