"""Time to the first token of a valid caller, alone and during a flood of random keys of the right form.

The flood calls a gateway that stands before a stub node with a new key each time, of tenants that exist, tenants that
don't and of administrators, at a fixed rate from a separate process. Both run in turn, so that what changes on the
host in between touches both alike. `flood_rps` is what was reached: refused callers wait in the gateway for 50 ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from adapters.keys import new_key
from benchmarks.common.latency import percentiles
from benchmarks.common.processes import process
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, example_adapter, publish, report
from benchmarks.gateway.rig import Rig, rig, steady

CONNECTIONS = 200
OWNERS = ("bench", "nobody", None, "somebody")
FLOOD_SECONDS = 600.0
GAP = 0.01
"""Seconds between two tokens of the stub node."""


class Flood(msgspec.Struct):
    url: str
    rate: float
    seconds: float


async def flood(target: Flood) -> dict[str, float]:
    """Calls per second by status, and in all."""
    place, statuses, begin = urlsplit(target.url), Counter[str](), time.monotonic()
    schedule = (begin + number / target.rate for number in range(int(target.rate * target.seconds)))

    async def connection(owners: Iterator[str | None]) -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        for when in schedule:  # shared: whoever is free takes the next one
            await asyncio.sleep(max(0.0, when - time.monotonic()))
            key = new_key(next(owners))[0]
            writer.write(f"GET /functions HTTP/1.1\r\nhost: {place.netloc}\r\nx-api-key: {key}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:] if line)
            await reader.readexactly(int(fields[b"content-length"]))
            statuses[head.split(maxsplit=2)[1].decode()] += 1
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(connection(cycle(OWNERS)))
    span = time.monotonic() - begin
    rates = {f"flood_{status}_rps": count / span for status, count in sorted(statuses.items())}
    return {"flood_rps": statuses.total() / span, **rates}


async def _valid(gateway: Rig, settings: dict[str, Any]) -> dict[str, float]:
    async with gateway.streams(gateway.gateway) as streams:
        samples = await steady(streams, settings["streams"], settings["tokens"], GAP, settings["seconds"])
    good = [sample for sample in samples if not sample.error]
    errors = len(samples) - len(good)
    return {"requests": len(samples), "errors": errors, **percentiles("ttft", [sample.ttft for sample in good])}


def measure(gateway: Rig, settings: dict[str, Any], log: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(settings["rounds"]):
        rows.append({"round": number, "beside": "nothing", **asyncio.run(_valid(gateway, settings))})
        target = Flood(gateway.gateway, settings["rate"], settings["seconds"] + 1)
        with process(["-m", "benchmarks.gateway.random_keys", "--flood"], msgspec.json.encode(target), log) as sender:
            time.sleep(0.5)  # the flood has begun
            row = asyncio.run(_valid(gateway, settings))
            assert sender.stdout is not None
            rows.append({"round": number, "beside": "flood", **row, **json.loads(sender.stdout.readline())})
    return rows


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    figures = {}
    for case in ("nothing", "flood"):
        mine = [row for row in rows if row["beside"] == case]
        for name in ("ttft_p50_ms", "ttft_p99_ms"):
            figures[f"{name}_beside_{case}"] = sorted(row[name] for row in mine)[len(mine) // 2]
        figures[f"errors_beside_{case}"] = sum(row["errors"] for row in mine)
    figures["flood_rps"] = min(row["flood_rps"] for row in rows if row["beside"] == "flood")
    return figures


def main() -> None:
    if sys.argv[1:] == ["--flood"]:
        target = msgspec.json.decode(sys.stdin.buffer.read(), type=Flood)
        print(json.dumps(asyncio.run(asyncio.wait_for(flood(target), FLOOD_SECONDS))), flush=True)
        return
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=2000.0, help="random keys per second")
    options = parser.parse_args()
    settings: dict[str, Any] = {
        "streams": 20, "tokens": 5, "seconds": 10.0, "rounds": options.rounds, "rate": options.rate,
    }  # fmt: skip
    if options.quick:
        settings |= {"streams": 4, "seconds": 1.0, "rounds": 1, "rate": 200.0}
    adapter = example_adapter(options.model)
    probe, begin = ContentionProbe(), time.monotonic()
    with tempfile.TemporaryDirectory() as root, rig(options.model, adapter, Path(root), GAP, GAP) as gateway:
        rows = measure(gateway, settings, Path(root) / "flood.log")
    settings |= {**probe.values(), "took_s": round(time.monotonic() - begin)}
    publish(report("random_keys", settings, options.seed, rows, figures_of(rows)), options.json)


if __name__ == "__main__":
    main()
