"""CPU time of one gateway worker per token that it relays, in this version and an earlier one (`--before`, a commit).

Both gateways run at once, each with its own stub node; one after the other carries the same streams, while the
other has none. A round counts the CPU time of the gateway's processes, and the tokens that the client receives, while
all streams are open: neither starts nor ends are in it. Client, stub nodes and gateways share the host's cores.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Hashable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.coldstart.paired import paired_ratio
from benchmarks.common.report import ROOT, arguments, contention_probe, publish, report
from benchmarks.gateway.control_plane import trees
from benchmarks.gateway.gateway import stolen_seconds, worker_seconds
from benchmarks.gateway.rig import Rig, rig

BEFORE = "8213bc2e"
SETTLE_S = 2.0
"""Wait until all streams are open, and at their end for the last tokens."""


async def measure(rigs: dict[str, Rig], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each version and round; the version that comes first changes with each round."""
    rows = []
    for number in range(settings["rounds"]):
        for version in list(rigs) if number % 2 else reversed(list(rigs)):
            rows.append({"round": number, "version": version, **await relayed(rigs[version], settings)})
    return rows


async def relayed(rig: Rig, settings: dict[str, Any]) -> dict[str, float]:
    tokens = round(settings["rate"] * (settings["seconds"] + 2 * SETTLE_S))
    async with rig.streams(rig.gateway) as streams:
        calls = [asyncio.ensure_future(streams.call(tokens)) for _ in range(settings["streams"])]
        await asyncio.sleep(SETTLE_S)
        began, cpu, stolen, count = time.monotonic(), worker_seconds(rig.pid), stolen_seconds(), len(streams.delays)
        await asyncio.sleep(settings["seconds"])
        seconds, cpu = time.monotonic() - began, worker_seconds(rig.pid) - cpu
        stolen, count = stolen_seconds() - stolen, len(streams.delays) - count
        samples = await asyncio.gather(*calls)
    return {
        "errors": sum(bool(sample.error) for sample in samples),
        "tok_s": count / seconds,
        "cpu_share": cpu / seconds,
        "cpu_us_per_token": 1e6 * cpu / count,
        "stolen_share": stolen / seconds / (os.cpu_count() or 1),
    }


def figures_of(rows: list[dict[str, Any]], seed: int) -> dict[str, float]:
    """Returns the median of each version's rounds, and the ratio of the versions by the rounds of both."""
    by_version: dict[str, dict[Hashable, float]] = {}
    for row in rows:
        by_version.setdefault(row["version"], {})[row["round"]] = row["cpu_us_per_token"]
    figures = {f"{version}_us_per_token": median(costs.values()) for version, costs in by_version.items()}
    ratio = paired_ratio(by_version.get("after", {}), by_version.get("before", {}), seed)
    if ratio is not None:
        figures |= {"ratio": ratio.median, "ratio_lower": ratio.median_lower, "ratio_upper": ratio.median_upper}
    return figures | {"errors": sum(row["errors"] for row in rows)}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--before", default=BEFORE, help="commit of the earlier version; empty: none")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    options = parser.parse_args()
    settings: dict[str, Any] = {"streams": 200, "rate": 25.0, "seconds": 10.0, "rounds": options.rounds}
    if options.quick:
        settings |= {"streams": 20, "seconds": 0.5, "rounds": 1}
    settings["before"] = options.before
    adapter = ROOT / "examples" / "adapters" / options.model.name / "pirate"
    probe = contention_probe()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        rigs = {}
        for version, tree in stack.enter_context(trees(options.before)).items():
            folder = Path(root) / version
            folder.mkdir()
            started = rig(options.model, adapter, folder, 1 / settings["rate"], 0.02, tree=tree)
            rigs[version] = stack.enter_context(started)
        rows = asyncio.run(measure(rigs, settings))
    settings |= {"probe_before_ms": probe, "probe_after_ms": contention_probe()}
    publish(report("relay_cost", settings, options.seed, rows, figures_of(rows, options.seed)), options.json)


if __name__ == "__main__":
    main()
