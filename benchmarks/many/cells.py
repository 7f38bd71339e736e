"""Measurements of one running service for many.py: its limits, and its answers to the calls of the trace."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from statistics import median
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.common.http_service import HttpService
from benchmarks.common.invoke import Answer, Caller, check, node_record
from benchmarks.common.latency import percentiles
from benchmarks.common.load import Planned, closed_loop, open_loop, open_session
from benchmarks.common.processes import service_usage
from benchmarks.many.trace_window import Window

CONCURRENCY = 16
REPEATS = 5
SHARES = (50, 95, 99)
BRING_ROUNDS = 5
"""Rounds of orders to the node, each of at most 10 s, before adapters are on the device."""
PATIENCE = 5.0
"""Multiple of the warm E2E of its prompt within which a call counts as goodput."""
EXPOSED_SHARE = 0.05
"""Share of a warm TTFT above which a wait for adapter bytes makes a call cold."""
TIES = {"float32": 1e-4, "bfloat16": 0.25}
"""Log probabilities closer than this may be swapped by another batch: by order of additions, or by two steps of logits
of 16 to 32."""
ORACLE_LEADS_S = (2.0, 0.5)
"""Seconds before each call at which the oracle sends its orders; the second is for adapters evicted meanwhile."""
ORACLE_AT_ONCE = 12
"""Orders under way; a node takes 16."""


@dataclass(frozen=True)
class Limits:
    """Limits of the service with all adapters resident. `warm`: TTFT and E2E by prompt, seconds."""

    capacity: float
    prefill_s: float
    """seconds to the first token of the longest prompt"""
    warm: list[tuple[float, float]]
    alone: dict[tuple[str, int], Answer]
    """answers by function and prompt, each called alone"""


@dataclass(frozen=True)
class Load:
    """The calls of a cell: at first `warmup` calls that have no part in its row."""

    window: Window
    warmup: int
    gap_s: float
    """mean gap between two calls"""
    prompts: Sequence[str]
    tokens: int

    @property
    def functions(self) -> list[str]:
        """Functions that are called, the most called first."""
        return [f"a{adapter}" for adapter, _ in Counter(each.adapter for each in self.window.arrivals).most_common()]

    @property
    def planned(self) -> list[Planned]:
        return [Planned(f"a{each.adapter}", self.prompts[each.prompt]) for each in self.window.arrivals]

    @property
    def schedule(self) -> list[float]:
        return [each.at * self.gap_s for each in self.window.arrivals]


async def measure_limits(
    service: HttpService, loads: Sequence[Load], *, long_prompt: str, ranks: Sequence[str]
) -> Limits:
    """`ranks`: a function of each rank. `long_prompt` is called with the first of them."""
    prompts, tokens = loads[0].prompts, loads[0].tokens
    async with open_session(service.key) as session, operator(service) as oracle:
        await bring_all(oracle, [*ranks, *loads[0].functions])
        call = Caller(session, service.url, [*prompts, long_prompt], max_tokens=tokens)
        longs = [await _good(call, Planned(ranks[0], long_prompt)) for _ in range(REPEATS + 1)]
        warm = []
        for prompt in prompts:
            rounds = [await _good(call, Planned(name, prompt)) for _ in range(2) for name in ranks][len(ranks) :]
            warm.append((median(each.ttft for each in rounds), median(each.e2e for each in rounds)))
        capacity = 0.0
        for _ in range(2):  # the first warms
            begin, planned = monotonic(), loads[0].planned[: 4 * CONCURRENCY]
            check(await closed_loop(call, planned, CONCURRENCY))
            capacity = len(planned) / (monotonic() - begin)
        with_alternatives = Caller(session, service.url, prompts, max_tokens=tokens, alternatives=2)
        alone: dict[tuple[str, int], Answer] = {}
        for each in (each for load in loads for each in load.planned):
            key = (each.model, prompts.index(each.prompt))
            if key not in alone:
                alone[key] = await _good(with_alternatives, each)
    return Limits(capacity, median(each.ttft for each in longs[1:]), warm, alone)


async def _good(call: Caller, planned: Planned) -> Answer:
    answer = await call(planned)
    check([answer])
    return answer


@asynccontextmanager
async def operator(service: HttpService) -> AsyncIterator[Oracle]:
    """Yields an oracle that orders prefetches of the node."""
    async with open_session(service.admin_key) as session:
        session.headers["x-garnish-tenant"] = "bench"
        record = await node_record(session, service.url)
        yield Oracle(session, f"{service.url}/nodes/{record['id']}/prefetch")


async def bring_all(oracle: Oracle, functions: Iterable[str]) -> None:
    """Raises RuntimeError unless every adapter reaches the device."""
    places, absent = asyncio.Semaphore(ORACLE_AT_ONCE), list(dict.fromkeys(functions))
    for _ in range(BRING_ROUNDS):
        tiers = await asyncio.gather(*(oracle.bring(name, places) for name in absent))
        absent = [name for name, tier in zip(absent, tiers, strict=True) if tier != "device"]
        if not absent:
            return
    raise RuntimeError(f"{absent} do not reach the device; the node's answers: {oracle.orders}")


async def run_cell(
    service: HttpService, load: Load, limits: Limits, *, is_announced: bool, resident: bool, tie: float
) -> Any:
    """Returns a row. `is_announced`: each load is ordered before its call; `resident`: all loads precede the calls."""
    async with open_session(service.key) as session, operator(service) as oracle:
        if resident:
            await bring_all(oracle, load.functions)
        call, schedule = Caller(session, service.url, load.prompts, max_tokens=load.tokens), load.schedule
        before = service_usage(service.pid)
        async with asyncio.TaskGroup() as group:
            if is_announced:
                names = [each.model for each in load.planned]
                group.create_task(oracle.order_ahead(list(zip(schedule, names, strict=True))))
            samples = await open_loop(call, load.planned, schedule)
        after = service_usage(service.pid)
        record = await node_record(oracle.session, service.url)
    answers = [sample for sample in samples[load.warmup :] if isinstance(sample, Answer)]
    row: dict[str, Any] = row_of(answers, limits, tie)
    row |= {f"{name}_cpu_s": after[name][0] - before[name][0] for name in after}
    row |= {f"{name}_mb": after[name][1] / 1e6 for name in after}
    for kind in ("useful", "late", "wasted"):
        row[f"prefetch_{kind}_bytes"] = record.get(f"prefetch_{kind}_bytes", 0)
    row["cpu_workers"] = record.get("cpu_workers")
    return row | {"orders": {str(status): count for status, count in sorted(oracle.orders.items())}}


def row_of(answers: Sequence[Answer], limits: Limits, tie: float) -> dict[str, Any]:
    """Returns the outcome of the calls. Shares are of those without an error; goodput counts from the first call on."""
    good = [each for each in answers if not each.error]
    where = Counter({"none": "device", "host": "host"}.get(each.state, "absent") for each in good)
    gaps = gaps_of_different(good, limits)
    ties = [gap for gap in gaps if gap < tie]
    in_time = sum(each.e2e <= PATIENCE * limits.warm[each.prompt][1] for each in good)
    seconds = max(each.end for each in answers) - min(each.sent for each in answers)
    tpots = [each.tpot for each in good if each.tpot is not None]
    return {
        "calls": len(answers),
        "errors": dict(Counter(each.error for each in answers if each.error)),
        "seconds": seconds,
        "cold_share": sum(is_cold(each, limits) for each in good) / len(good),
        **{f"{tier}_share": where[tier] / len(good) for tier in ("device", "host", "absent")},
        **percentiles("ttft", [each.ttft for each in good], SHARES),
        **percentiles("e2e", [each.e2e for each in good], SHARES),
        **percentiles("tpot", tpots, SHARES),
        **percentiles("exposed", [each.exposed_s for each in good], SHARES),
        "late_max_ms": max(each.late or 0.0 for each in answers) * 1e3,
        "goodput": in_time / seconds,
        "wrong_tokens": len(gaps) - len(ties),
        "ties": len(ties),
        "widest_gap": max((gap for gap in gaps if gap < inf), default=0.0),
    }


def is_cold(answer: Answer, limits: Limits) -> bool:
    """Returns whether the adapter came from store or disk, or delayed the computation by EXPOSED_SHARE."""
    waited = answer.exposed_s > EXPOSED_SHARE * limits.warm[answer.prompt][0]
    return answer.state not in ("none", "host") or waited


def gaps_of_different(answers: Iterable[Answer], limits: Limits) -> list[float]:
    """Returns a gap for each text that differs from what the function answers alone.

    The gap is between that answer's two best log probabilities at the first token that differs, and infinite where no
    token does. The rest is not compared.
    """
    gaps = []
    for answer in answers:
        alone = limits.alone[answer.model, answer.prompt]
        if answer.text != alone.text:
            pairs = zip(answer.tokens, alone.tokens, alone.gaps, strict=False)
            gaps.append(next((gap for ours, theirs, gap in pairs if ours != theirs), inf))
    return gaps


@dataclass
class Oracle:
    """Orders a node to bring in each adapter shortly before its call. `orders` has the statuses of the answers."""

    session: aiohttp.ClientSession
    """session with an operator's key"""
    url: str
    """URL of the node's prefetches, at the gateway"""
    orders: dict[int, int] = field(default_factory=dict)

    async def order_ahead(self, calls: Sequence[tuple[float, str]]) -> None:
        """`calls`: seconds from now, ascending, and functions. Ends with the last order's answer."""
        begin, places = time.perf_counter(), asyncio.Semaphore(ORACLE_AT_ONCE)
        schedule = sorted((max(0.0, at - lead), name) for at, name in calls for lead in ORACLE_LEADS_S)
        async with asyncio.TaskGroup() as group:
            for at, name in schedule:
                await asyncio.sleep(begin + at - time.perf_counter())
                group.create_task(self.bring(name, places))

    async def bring(self, name: str, places: asyncio.Semaphore) -> str | None:
        """Returns where the function's adapter is then; None if it is still on its way after 10 s, or was refused."""
        async with places, self.session.post(self.url, json={"function": name}) as reply:
            self.orders[reply.status] = self.orders.get(reply.status, 0) + 1
            tier: str | None = (await reply.json()).get("tier")
            return tier
