"""A load step on a local pool under `garnish autoscale`: none -> 1 for a call that is held, 1 -> 3 under load, back.

Callers stream one completion after another, and their number changes by steps. A node computes 32 requests at
once, and counts as full at 0.7 of them. All nodes share this host's cores: what is shown is when nodes come and go and
what callers notice of it, not how fast they are. `lost`: requests without a complete answer; it must be 0.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.autoscale.pool_service import PoolService
from benchmarks.common.latency import Sample
from benchmarks.common.load import OpenAiServer, Planned, open_session, plan
from benchmarks.common.report import STORIES, arguments, publish, report

STEPS = ((1, 20.0), (8, 40.0), (80, 120.0), (8, 60.0), (0, 60.0))
QUICK_STEPS = ((1, 2.0), (50, 14.0), (0, 6.0))
POOL = {"min": 0, "desired": 0, "max": 3, "scale_to_zero_after": "20s", "scaling": {"up": "5s", "down": "20s"}}
QUICK_POOL = {**POOL, "scale_to_zero_after": "1s", "scaling": {"up": "1s", "down": "2s"}}
TOKENS, PROMPT_TOKENS = 128, 32
LOOK_SECONDS = 0.5
BIN_SECONDS = 2.0
HOLD = "3m"
HELD_LIMIT = 240.0


@dataclass
class Observations:
    begin: float
    samples: list[Sample] = field(default_factory=list)
    looks: list[dict[str, Any]] = field(default_factory=list)
    callers: int = 0


async def study(service: PoolService, steps: tuple[tuple[int, float], ...], seed: int) -> Observations:
    observed = Observations(time.perf_counter())
    planned = iter(plan([service.base], 200_000, PROMPT_TOKENS, seed))
    async with open_session(service.key, HELD_LIMIT) as session, asyncio.TaskGroup() as group:
        call, looking = OpenAiServer(session, service.url, TOKENS), group.create_task(_poll(service, observed))
        callers: list[asyncio.Task[None]] = []
        for number, seconds in steps:
            observed.callers = number
            callers += [
                group.create_task(_caller(call, planned, observed, place)) for place in range(len(callers), number)
            ]
            if not observed.samples:
                while not observed.samples and not callers[0].done():  # noqa: ASYNC110  (the first call is held)
                    await asyncio.sleep(0.05)
            await asyncio.sleep(seconds)
            if number < len(callers):
                await asyncio.gather(*callers[number:])  # the rest end their last request once they see the number
                del callers[number:]
        looking.cancel()
    return observed


async def _caller(call: OpenAiServer, planned: Any, observed: Observations, place: int) -> None:
    while place < observed.callers:
        request: Planned = next(planned)
        observed.samples.append(await call(request))


async def _poll(service: PoolService, observed: Observations) -> None:
    headers = {"authorization": f"Bearer {service.admin_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            async with session.get(f"{service.url}/pools") as reply:
                reply_body = await reply.json()
            pool = next((pool for pool in reply_body["pools"] if pool["pool"] == "here"), {"ready": 0, "demand": 0.0})
            decisions = [entry for entry in service.decided if entry["wanted"] is not None]
            observed.looks.append(
                {
                    "at": round(time.perf_counter() - observed.begin, 2),
                    "callers": observed.callers,
                    "open": pool.get("open_requests", 0) + reply_body["unplaced"]["open_requests"],
                    "ready": pool["ready"],
                    "desired": decisions[-1]["wanted"] if decisions else 0,
                    "demand": round(pool["demand"], 3),
                }
            )
            await asyncio.sleep(LOOK_SECONDS)


def rows_of(observed: Observations, decided: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Looks, TTFT in bins of when requests were sent, and the changes of size with their reasons."""
    bins: dict[int, list[float]] = {}
    for sample in observed.samples:
        if not sample.error:
            bins.setdefault(int((sample.sent - observed.begin) // BIN_SECONDS), []).append(sample.ttft)
    first = [
        {
            "at": number * BIN_SECONDS,
            "median_s": round(median(times), 4),
            "most_s": round(max(times), 4),
            "n": len(times),
        }
        for number, times in sorted(bins.items())
    ]
    moves = [
        {"at": round(entry["seen"] - observed.begin, 2), **{name: entry[name] for name in ("size", "wanted", "reason")}}
        for entry in decided
        if entry["action"] == "set" and entry["size"] != entry["wanted"]
    ]
    return [{"looks": observed.looks, "ttft": first, "moves": moves}]


def figures_of(observed: Observations, steps: tuple[tuple[int, float], ...]) -> dict[str, float]:
    max_callers = max(number for number, _ in steps)
    step = next(sample["at"] for sample in observed.looks if sample["callers"] == max_callers)
    three = [sample["at"] for sample in observed.looks if sample["ready"] == 3]
    good = [sample for sample in observed.samples if not sample.error]
    figures = {
        "requests": len(observed.samples),
        "lost": len(observed.samples) - len(good),
        "held_first_call_s": observed.samples[0].ttft if good else -1.0,
        "most_nodes": max(sample["ready"] for sample in observed.looks),
        "nodes_at_end": observed.looks[-1]["ready"],
        "three_nodes_after_s": three[0] - step if three else -1.0,
    }
    if three:
        for name, begin, end in (("before", step, three[0]), ("three_nodes", three[0], three[-1])):
            times = [sample.ttft for sample in good if begin <= sample.sent - observed.begin < end]
            if times:
                figures[f"ttft_p50_ms_{name}"], figures[f"ttft_max_ms_{name}"] = median(times) * 1e3, max(times) * 1e3
    return figures


def main() -> None:
    parser = arguments(__doc__ or "", STORIES)
    options = parser.parse_args()
    steps, pool = (QUICK_STEPS, QUICK_POOL) if options.quick else (STEPS, POOL)
    with (
        tempfile.TemporaryDirectory() as root,
        PoolService(options.model, Path(root) / "s", pool, HOLD) as service,
    ):
        observed = asyncio.run(study(service, steps, options.seed))
        rows = rows_of(observed, service.decided)
    settings = {"steps": [list(step) for step in steps], "pool": pool, "tokens": TOKENS, "prompt_tokens": PROMPT_TOKENS}
    settings |= {"model": options.model.name, "dtype": "float32"}
    publish(report("autoscale", settings, options.seed, rows, figures_of(observed, steps)), options.json)


if __name__ == "__main__":
    main()
