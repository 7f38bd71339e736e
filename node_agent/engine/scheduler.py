"""Decides in each iteration which requests enter the batch (`admit`) and which tokens are computed (`compose`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from node_agent.engine.adapter_tiers import AdapterTiers
from node_agent.engine.admission import Admission
from node_agent.engine.limits import Limits
from node_agent.engine.prefixes import Prefixes
from node_agent.engine.promises import beside_flood, tightest_promise, within_promise
from node_agent.engine.request import Request
from node_agent.engine.reserves import Callers, Reserves
from node_agent.engine.rows import Row
from node_agent.engine.waiting import WaitingQueue
from node_agent.performance.drift import Drift

Loaded = Callable[[Request], bool]
Turn = Callable[[Request], float]

MIN_HOT_SHARE = 4
"""Divisor: at least 1/n of an iteration's prompt tokens is for adapters on the device, however much cold passes use."""
MIN_BESIDE_STRICT = 16
"""Divisor: at least 1/n of an iteration's prompt tokens is computed, whatever strict requests were promised."""


@dataclass(frozen=True)
class HotRows:
    """Rows of one hot pass. The first `n_decode` are decode rows."""

    rows: list[Row]
    n_decode: int


class Scheduler:
    """Scheduler of the batch `running` (requests by id), which the engine changes."""

    def __init__(self, limits: Limits, running: dict[str, Request], prefixes: Prefixes, store: AdapterTiers) -> None:
        self.queue = WaitingQueue(limits.queue_limit)
        self.callers = Callers()
        self.short = False
        """whether the last admission left a request waiting for a row or KV blocks"""
        self._running, self._prefixes, self._store = running, prefixes, store

    def reserves(self, max_rows: int) -> Reserves:
        """Returns the reserves for the present batch and queue."""
        return Reserves(self.callers, self.queue, self._running.values(), max_rows, self._prefixes.blocks.total)

    def admit(self, max_rows: int, preempt: Callable[[Request], None]) -> Admission:
        """Removes requests that are admitted or permanently refused from the queue, and returns them. `preempt` frees
        the resources of a preempted request."""
        running = list(self._running.values())
        admission = Admission(running, max_rows, self._prefixes, self._store, self.reserves(max_rows), preempt)
        admission.look_at(self.queue)
        self.short = admission.short
        return admission

    def cold_tokens(self, limits: Limits, drift: Drift | None, cold: Iterable[Request]) -> int:
        """Returns the number of prompt tokens for the cold passes of an iteration. `cold`: the requests of these
        passes. If all are best effort while other calls are recent, the number is limited as for hot passes."""
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
        """Yields the rows of an iteration's hot passes. Each pass is chosen after the previous one was computed.

        `used`: prompt tokens of the iteration that cold passes have used. `joining`: ids of requests that decode while
        their adapter is loading.

        A flood is best-effort load, or a tenant that asks for more than the node has. During a flood, prompts of other
        requests get a separate pass first. The prompt tokens of the batch's pass are then limited, so that no new call
        waits long for its end. Otherwise the flood would delay first tokens whatever the order of admission. Without a
        flood, an additional pass would only read the weights once more.
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
        """Returns the requests without a first token whose prompts are computed before the batch's pass. Returns None
        if there is no flood: no crowding tenant, and no best-effort request that runs while others call."""
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
        """Returns the requests that decode, and those whose prompts are computed. Considers only requests with a loaded
        adapter and `joining` ones."""
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
    """Returns the rows of the next hot pass, and the number of decode rows among them. Decode rows come first, then
    prompt chunks; both are in order of adapter slots.

    Each request in `decoding` advances by one token. Chunks of `prompts` share what the decode rows leave of
    `chunk_tokens`, but at most `spare` tokens (infinite: no limit; negative: no time). They get at least one token, so
    that prompts advance.
    """
    decode = sorted((Row(request, 1) for request in decoding), key=_slot)
    tokens = max(int(min(chunk_tokens - len(decode), spare)), 1)
    return decode + choose_prompts(prompts, loaded, tokens, counter), len(decode)


def choose_prompts(requests: Iterable[Request], loaded: Loaded, tokens: int, counter: Turn) -> list[Row]:
    """Returns prompt chunks of at most `tokens` tokens in total, in order of adapter slots. Strict requests come first,
    then those whose tenants have the smallest `counter`, then the oldest. Requests with open cold passes are left
    out."""
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
