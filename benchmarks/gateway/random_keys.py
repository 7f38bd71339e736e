"""A valid caller beside a flood of random keys of the right form: its time to the first token alone, and beside it.

The flood calls a gateway that stands before a stub node with a new key each time, of tenants that exist, tenants that
don't and of administrators, at a fixed rate from a process of its own. Both run in turn, so that what changes on the
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
"""After which a flood ends that nobody ended."""
GAP = 0.01
"""Seconds between two tokens of the stub node."""


class Flood(msgspec.Struct):
    url: str
    rate: float
    seconds: float


async def flood(wanted: Flood) -> dict[str, float]:
    """Calls per second by status, and in all."""
    place, statuses, begin = urlsplit(wanted.url), Counter[str](), time.monotonic()
    due = (begin + number / wanted.rate for number in range(int(wanted.rate * wanted.seconds)))

    async def connection(owners: Iterator[str | None]) -> None:
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        for when in due:  # shared: whoever is free takes the next one
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


async def _valid(found: Rig, settings: dict[str, Any]) -> dict[str, float]:
    async with found.streams(found.gateway) as streams:
        samples = await steady(streams, settings["streams"], settings["tokens"], GAP, settings["seconds"])
    good = [sample for sample in samples if not sample.error]
    errors = len(samples) - len(good)
    return {"requests": len(samples), "errors": errors, **percentiles("ttft", [sample.ttft for sample in good])}


def measure(found: Rig, settings: dict[str, Any], log: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(settings["rounds"]):
        rows.append({"round": number, "beside": "nothing", **asyncio.run(_valid(found, settings))})
        wanted = Flood(found.gateway, settings["rate"], settings["seconds"] + 1)
        with process(["-m", "benchmarks.gateway.random_keys", "--flood"], msgspec.json.encode(wanted), log) as sender:
            time.sleep(0.5)  # the flood has begun
            beside = asyncio.run(_valid(found, settings))
            assert sender.stdout is not None
            rows.append({"round": number, "beside": "flood", **beside, **json.loads(sender.stdout.readline())})
    return rows


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    figures = {}
    for beside in ("nothing", "flood"):
        mine = [row for row in rows if row["beside"] == beside]
        for name in ("ttft_p50_ms", "ttft_p99_ms"):
            figures[f"{name}_beside_{beside}"] = sorted(row[name] for row in mine)[len(mine) // 2]
        figures[f"errors_beside_{beside}"] = sum(row["errors"] for row in mine)
    figures["flood_rps"] = min(row["flood_rps"] for row in rows if row["beside"] == "flood")
    return figures


def main() -> None:
    if sys.argv[1:] == ["--flood"]:
        wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Flood)
        print(json.dumps(asyncio.run(asyncio.wait_for(flood(wanted), FLOOD_SECONDS))), flush=True)
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
    with tempfile.TemporaryDirectory() as root, rig(options.model, adapter, Path(root), GAP, GAP) as found:
        rows = measure(found, settings, Path(root) / "flood.log")
    settings |= {**probe.values(), "took_s": round(time.monotonic() - begin)}
    publish(report("random_keys", settings, options.seed, rows, figures_of(rows)), options.json)


if __name__ == "__main__":
    main()
