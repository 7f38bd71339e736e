"""Latency that the gateway adds: the same client calls a stub node directly and through the gateway, in turn.

`added_*`: a percentile through the gateway less the same percentile without it, for the time to the first token and for
the gap between two tokens; `added_p50_ms` and `added_p99_ms` are the larger of both. Two gateway workers, which share
a Redis, unless `--workers 1` is asked for; client, stub node and Redis use the same cores.

Where the host of a virtual machine gives its cores to others, a round says so. Every round counts all the same;
rounds.py has the figures of rounds in which it took next to nothing, too.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.latency import Sample, percentiles
from benchmarks.common.processes import child_pids, cpu_seconds
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, example_adapter, publish, report
from benchmarks.gateway.rig import Rig, rig, steady
from benchmarks.gateway.rounds import figures_of
from tests.support.redis_server import redis_server

RATE = 20.0
"""Tokens per second of one stream."""
PREFILL = 0.02
CALLERS = 32


async def measure(rig: Rig, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    rows: list[dict[str, Any]] = [
        {"round": number, "server": server, **await _steady(rig, server, settings)}
        for number in range(settings["rounds"])
        for server in ("direct", "gateway")
    ]
    figures = figures_of(rows)
    figures["rps"] = await _rps(rig, settings["rps_seconds"])
    figures["idle_streams_held"] = await _idle(rig, settings["idle_streams"], settings["idle_seconds"])
    return rows, figures


async def _steady(rig: Rig, server: str, settings: dict[str, Any]) -> dict[str, float]:
    async with rig.streams(rig.stub if server == "direct" else rig.gateway) as streams:
        begin, stolen = worker_seconds(rig.pid), stolen_seconds()
        samples = await steady(streams, settings["streams"], settings["tokens"], 1 / RATE, settings["seconds"])
    good = [sample for sample in samples if not sample.error]
    gaps = [after - before for sample in good for before, after in pairwise(sample.times)]
    span = max(sample.end for sample in samples) - min(sample.sent for sample in samples)
    return {
        "requests": len(samples),
        "errors": len(samples) - len(good),
        "tok_s": sum(len(sample.times) for sample in good) / span,
        "gateway_cpu_share": (worker_seconds(rig.pid) - begin) / span,
        "stolen_share": (stolen_seconds() - stolen) / span / (os.cpu_count() or 1),
        **percentiles("ttft", [sample.ttft for sample in good]),
        **percentiles("gap", gaps),
        **percentiles("delay", streams.delays),
    }


async def _rps(rig: Rig, seconds: float) -> float:
    """Calls of one token, streamed, per second: each caller calls again as soon as it is answered."""
    async with rig.streams(rig.gateway) as streams:
        samples = await steady(streams, CALLERS, 1, 0.0, seconds)
    if any(sample.error for sample in samples):
        raise RuntimeError(f"calls failed: { ({sample.error for sample in samples}) }")
    return len(samples) / (max(sample.end for sample in samples) - min(sample.sent for sample in samples))


async def _idle(rig: Rig, count: int, seconds: float) -> float:
    """Streams that are open at once, between two tokens, and then end as they should."""
    async with rig.streams(rig.gateway) as streams:
        calls: list[asyncio.Task[Sample]] = []
        for number in range(count):
            calls.append(asyncio.create_task(streams.call(2, seconds)))
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        samples = await asyncio.gather(*calls)
    good = [sample for sample in samples if not sample.error and len(sample.times) == 2]
    began, ended = max(sample.times[0] for sample in good), min(sample.times[1] for sample in good)
    return float(len(good)) if began < ended else 0.0


def stolen_seconds() -> float:
    """Returns the seconds of all processors that the host of this virtual machine took away."""
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / 100


def worker_seconds(pid: int) -> float:
    """Returns processor seconds of the gateway and its workers."""
    return sum(map(cpu_seconds, [pid, *child_pids(pid)]))


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2, help="of the gateway; 1 goes without Redis")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "streams": 200,
        "tokens": 40,
        "seconds": 3.0,
        "rounds": options.rounds,
        "rps_seconds": 5.0,
    }
    settings |= {"idle_streams": 2000, "idle_seconds": 20.0, "rate": RATE, "workers": options.workers}
    if options.quick:
        settings |= {"streams": 20, "tokens": 10, "seconds": 0.5, "rounds": 1, "rps_seconds": 0.5}
        settings |= {"idle_streams": 50, "idle_seconds": 1.0}
    adapter = example_adapter(options.model)
    probe, begin = ContentionProbe(), time.monotonic()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        folder = Path(root)
        redis = stack.enter_context(redis_server(folder)).url if options.workers > 1 else None
        started = rig(options.model, adapter, folder, 1 / RATE, PREFILL, options.workers, redis)
        rows, figures = asyncio.run(measure(stack.enter_context(started), settings))
    settings |= {**probe.values(), "took_s": round(time.monotonic() - begin)}
    publish(report("gateway", settings, options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
