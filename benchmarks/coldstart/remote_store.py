"""A cold call of a service as a user starts it, whose registry is on an S3 server far away: how near it comes to the
least that is possible.

Adapters of ranks 8 to 64, half of them on q, k, v and half on all seven projections, lie on moto's S3 server behind a
network of 50 MB/s and 20 ms a request (common/slow_link.py). A service of each way is up. Each adapter is called
for the first time since the start, and then twice more, one call at a time, over HTTP, of one service and then of the
other. `bound`: a call's own, max(fetch, warm TTFT) + (warm E2E - warm
TTFT); the fetch is 20 ms and the artifact's bytes over the rate. `cold_over_bound` is over all adapters,
`cold_over_warm` over those whose fetch takes at most one warm TTFT. Of the warm calls the faster one counts.
`plain_fetch`: what one GET of the whole artifact by boto3 takes through the same network just before the cold call,
while the service is idle; `cold_over_plain` has it in the bound in the place of the fetch. `auto` is the default;
`wait` (`node.cold_start: wait`) loads, then computes: of one call at a time that is what both ONDMD, which stands
still meanwhile, and OVERLAP, which computes others, do.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import boto3
import torch

from adapters.base_model import PROJECTIONS, load_base_model
from adapters.choices import Resolved
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.s3_url import parse_s3_url
from benchmarks.common.adapters import TARGETS, make_adapters
from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample
from benchmarks.common.load import WORDS, OpenAiServer, Planned, open_session
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, publish, report
from benchmarks.common.s3 import s3_server
from benchmarks.common.slow_link import slow_s3

RATE, DELAY = 50e6, 0.02
RANKS = (8, 16, 32, 64)
ADAPTERS, TOKENS = 40, 64
WAYS = ("auto", "wait")
ALL = [f"{name}_proj" for name in PROJECTIONS]


def study(model: Path, root: Path, adapters: int, seed: int) -> list[dict[str, Any]]:
    """A row per way and adapter."""
    half = [RANKS[i % len(RANKS)] for i in range(adapters // 2)]
    paths = make_adapters(model, root / "qkv", half, seed, TARGETS, torch.bfloat16)
    paths += make_adapters(model, root / "all", half, seed + 1, ALL, torch.bfloat16)
    with s3_server(max(os.sched_getaffinity(0))) as url, slow_s3(RATE, DELAY), ExitStack() as stack:
        services = [stack.enter_context(_service(model, paths, root, f"{url}/{mode}", mode)) for mode in WAYS]
        return asyncio.run(_rows(services, seed))


@dataclass(frozen=True)
class Service:
    mode: str
    http: HttpService
    plain: PlainClient
    versions: list[Resolved]


@contextmanager
def _service(model: Path, paths: list[Path], root: Path, registry: str, mode: str) -> Iterator[Service]:
    node = "" if mode == "auto" else f", cold_start: {mode}"
    with HttpService(model, paths, root / mode, "auto", 0, node, registry=registry) as http:
        functions = Registry(open_store(registry), load_base_model(model, model.name))
        versions = [functions.resolve("bench", f"a{i}") for i in range(len(paths))]
        yield Service(mode, http, PlainClient(registry), versions)


class PlainClient:
    """Fetches artifacts as a client does that wants nothing but their bytes."""

    def __init__(self, registry: str) -> None:
        self._place, self._s3 = parse_s3_url(registry), boto3.client("s3")

    def fetch(self, key: str) -> float:
        """Seconds from the request to the last byte."""
        begin = time.perf_counter()
        body = self._s3.get_object(Bucket=self._place.bucket, Key=f"{self._place.prefix}/{key}")["Body"]
        for _ in body.iter_chunks(1 << 20):
            pass
        return time.perf_counter() - begin


async def _rows(services: Sequence[Service], seed: int) -> list[dict[str, Any]]:
    """All ways of an adapter one after the other, in turns the first one first and the last one first."""
    rows, words, rng = list[dict[str, Any]](), WORDS.split(), random.Random(seed)
    async with AsyncExitStack() as stack:
        calls = {}
        for each in services:
            session = await stack.enter_async_context(open_session(each.http.key))
            calls[each.mode] = call = OpenAiServer(session, each.http.url, TOKENS)
            each.plain.fetch(each.versions[0].artifact_key)  # its connection is made
            for name in ("a0", each.http.base, each.http.base):  # what a service's first calls warm
                await _good(call, Planned(name, " ".join(rng.choices(words, k=TOKENS))))
        for i in range(1, len(services[0].versions)):
            planned = Planned(f"a{i}", " ".join(rng.choices(words, k=TOKENS)))
            for each in services if i % 2 else reversed(services):
                version = each.versions[i]
                fetch_s = await asyncio.to_thread(each.plain.fetch, version.artifact_key)
                cold, *warm = [await _good(calls[each.mode], planned) for _ in range(3)]
                fastest = min(warm, key=lambda sample: sample.e2e)
                rows.append(measured(each.mode, i, version.bytes, fetch_s, cold, fastest))
    return rows


async def _good(call: OpenAiServer, planned: Planned) -> Sample:
    sample = await call(planned)
    if sample.error or sample.output_tokens != TOKENS:
        raise RuntimeError(f"a call of {planned.model} ended with {sample.error or sample.output_tokens}")
    return sample


def measured(mode: str, adapter: int, size: int, plain_fetch_s: float, cold: Sample, warm: Sample) -> dict[str, Any]:
    """Returns the row of one adapter; seconds."""
    row: dict[str, Any] = {
        "way": mode, "adapter": adapter, "bytes": size, "fetch_s": DELAY + size / RATE, "plain_fetch_s": plain_fetch_s,
        "cold_ttft_s": cold.ttft, "cold_e2e_s": cold.e2e, "warm_ttft_s": warm.ttft, "warm_e2e_s": warm.e2e,
    }  # fmt: skip
    return row | {"bound_s": _bound(row, row["fetch_s"])}


def _bound(row: dict[str, Any], fetch_s: float) -> float:
    """Returns the fewest seconds that the row's call can take with this fetch."""
    return float(max(fetch_s, row["warm_ttft_s"]) + row["warm_e2e_s"] - row["warm_ttft_s"])


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians and worst cases, by way."""
    figures: dict[str, float] = {}
    for mode in dict.fromkeys(row["way"] for row in rows):
        of = [row for row in rows if row["way"] == mode]
        ratios = {
            "cold_over_bound": [row["cold_e2e_s"] / row["bound_s"] for row in of],
            "cold_over_plain": [row["cold_e2e_s"] / _bound(row, row["plain_fetch_s"]) for row in of],
            "plain_over_fetch": [row["plain_fetch_s"] / row["fetch_s"] for row in of],
            "cold_over_warm": [
                row["cold_e2e_s"] / row["warm_e2e_s"] for row in of if row["fetch_s"] <= row["warm_ttft_s"]
            ],
            "ttft_over_bound": [row["cold_ttft_s"] / max(row["fetch_s"], row["warm_ttft_s"]) for row in of],
        }
        for name, values in ratios.items():
            if values:
                figures |= {f"{name}_{mode}": median(values), f"{name}_{mode}_max": max(values)}
                figures[f"{name}_{mode}_count"] = len(values)
    return figures


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    options = parser.parse_args()
    adapters, probe = 4 if options.quick else ADAPTERS, ContentionProbe()
    with tempfile.TemporaryDirectory() as root:
        rows = study(options.model, Path(root), adapters, options.seed)
    settings = {
        "model": options.model.name, "adapters": adapters, "ranks": RANKS, "tokens": TOKENS, "rate": RATE,
        "delay": DELAY, "ways": WAYS, **probe.values(),
    }  # fmt: skip
    publish(report("remote_store", settings, options.seed, rows, figures_of(rows)), options.json)


if __name__ == "__main__":
    main()
