"""Answers the two questions of each iteration: who enters the batch (`admit`), and what is computed (`compose`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.admission import Admission
from node_agent.engine.batch import Row
from node_agent.engine.limits import Limits
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.promises import beside_flood, tightest_promise, within_promise
from node_agent.engine.request import Request
from node_agent.engine.reserves import Callers, Reserves
from node_agent.engine.waiting import WaitingQueue
from node_agent.performance.drift import Drift

Loaded = Callable[[Request], bool]
Turn = Callable[[Request], float]

MIN_HOT_SHARE = 4
"""Fraction 1/n of an iteration's prompt tokens for adapters that are there, whatever the cold ones take."""
MIN_BESIDE_STRICT = 16
"""Fraction 1/n for prompts, whatever strict requests were promised."""


@dataclass(frozen=True)
class HotRows:
    """The rows of one pass; the first `n_decode` decode."""

    rows: list[Row]
    n_decode: int


class Scheduler:
    """Reads the batch (`running`, by id), which the engine changes."""

    def __init__(self, limits: Limits, running: dict[str, Request], prefixes: Prefixes, store: AdapterStore) -> None:
        self.queue = WaitingQueue(limits.queue_limit)
        self.callers = Callers()
        self.short = False
        """The last look at the queue left somebody in it for want of a row or of KV blocks."""
        self._running, self._prefixes, self._store = running, prefixes, store

    def reserves(self, max_rows: int) -> Reserves:
        """Returns what each request must leave free now."""
        return Reserves(self.callers, self.queue, self._running.values(), max_rows, self._prefixes.blocks.total)

    def admit(self, max_rows: int, preempt: Callable[[Request], None]) -> Admission:
        """Take out of the queue who is admitted, or refused for good. `preempt` frees what a request holds that gives
        its place to another."""
        running = list(self._running.values())
        admission = Admission(running, max_rows, self._prefixes, self._store, self.reserves(max_rows), preempt)
        admission.look_at(self.queue)
        self.short = admission.short
        return admission

    def cold_tokens(self, limits: Limits, drift: Drift | None, cold: Iterable[Request]) -> int:
        """Returns how many prompt tokens an iteration's cold passes may have, which are those of `cold`. Where only
        best effort has some, they are kept as short as hot ones while others call."""
        if any(r.slo_class != "best_effort" for r in cold) or not self.callers.awaited(time.monotonic()):
            return limits.chunk_tokens
        decoding = [request for request in self._running.values() if request.decoding]
        spare = beside_flood(drift.published if drift else None, decoding, limits.chunk_tokens)
        return max(1, int(min(spare, limits.chunk_tokens)))

    def compose(
        self,
        limits: Limits,
        used: int,
        is_loaded: Callable[[Request], bool],
        drift: Drift | None,
        joining: Collection[str] = (),
    ) -> Iterator[HotRows]:
        """Yields the rows of an iteration's hot passes, each chosen when the one before has been computed. Cold passes
        `used` a part of the iteration's prompt tokens; `joining`: ids of requests that decode though their adapter is
        still on its way.

        A flood is a tenant that asks for more than the node has, or best effort. During one, prompts of the others get
        a pass before the batch's, and the batch's chunk is cut so that no call waits for it long. In the batch's pass,
        and behind whole chunks, a first token would come later than without the flood, in whatever order requests are
        admitted. Without a flood, every pass more would only read the weights once more.
        """
        chunk_tokens, model = limits.chunk_tokens, drift.published if drift else None
        first = self._first_prompts(limits.max_rows)
        strict = model is not None and tightest_promise(self._running.values(), model) is not None
        overtook = 0
        if first and not strict:
            rows = choose_prompts(first, is_loaded, chunk_tokens, self.queue.counter)
            overtook = sum(row.length for row in rows)
            if rows:
                yield HotRows(rows, 0)
        decoding, prompts = self._parts(is_loaded, joining)
        slower = drift.both.value if drift else 1.0
        decoding, spare = within_promise(
            model, decoding, prompts, chunk_tokens, chunk_tokens // MIN_BESIDE_STRICT, slower, used
        )
        if first is not None and spare == inf:
            spare = beside_flood(model, decoding, chunk_tokens) - used
        remaining = max(chunk_tokens - used - overtook, chunk_tokens // MIN_HOT_SHARE)
        rows, n_decode = choose_hot(decoding, prompts, is_loaded, remaining, spare, self.queue.counter)
        if rows:
            yield HotRows(rows, n_decode)

    def _first_prompts(self, max_rows: int) -> list[Request] | None:
        """Returns the requests without a first token whose prompts go before the batch; None where the batch keeps
        nobody waiting: no tenant floods, and no best effort runs while others call."""
        running = self._running.values()
        reserves = self.reserves(max_rows) if self.queue and self.short else None
        is_flood = reserves is not None and reserves.crowded
        is_awaited = self.callers.awaited(time.monotonic()) and any(r.slo_class == "best_effort" for r in running)
        if not is_flood and not is_awaited:
            return None
        prompts = [r for r in running if not r.first_token]
        light = [r for r in prompts if is_flood and reserves is not None and reserves.modest(r.tenant)]
        awaited = [r for r in prompts if r.slo_class != "best_effort"]
        return [r for r in light if r in awaited] or (awaited if is_awaited else []) or light

    def _parts(
        self, is_loaded: Callable[[Request], bool], joining: Collection[str]
    ) -> tuple[list[Request], list[Request]]:
        """Returns who decodes, and whose prompt is computed, of those whose whole adapter is there or who join without
        it."""
        ready = [r for r in self._running.values() if r.id in joining or is_loaded(r)]
        return [r for r in ready if r.decoding], [r for r in ready if not (r.decoding or r.in_cold_pass)]


def choose_hot(
    decoding: Iterable[Request],
    prompts: Iterable[Request],
    loaded: Loaded,
    chunk_tokens: int,
    spare: float,
    counter: Turn,
) -> tuple[list[Row], int]:
    """Returns the rows of the next hot pass (decode rows first, each part in order of adapter slots), and how many
    decode.

    Each of `decoding` advances by a token. Chunks of `prompts` have at most what the decode rows leave of
    `chunk_tokens`, and at most `spare` tokens (infinite: no such bound; negative: there is no time); at least one token
    in any case, so that prompts advance.
    """
    decode = sorted((Row(request, 1) for request in decoding), key=_slot)
    tokens = max(int(min(chunk_tokens - len(decode), spare)), 1)
    return decode + choose_prompts(prompts, loaded, tokens, counter), len(decode)


def choose_prompts(requests: Iterable[Request], loaded: Loaded, tokens: int, counter: Turn) -> list[Row]:
    """Returns chunks of `tokens` tokens together, in order of adapter slots. Strict requests come first, then those of
    the smallest `counter` (their tenants'), then the oldest. Chunks that a cold pass computes are left out."""
    rows: list[Row] = []
    for request in sorted(requests, key=lambda request: (request.slo_class != "strict", counter(request))):
        if not tokens:
            break
        if request.in_cold_pass or not loaded(request):
            continue
        length = min(request.uncomputed, tokens)
        rows.append(Row(request, length))
        tokens -= length
    rows.sort(key=_slot)
    return rows


def _slot(row: Row) -> int:
    return -1 if row.request.lease is None else row.request.lease.slot
