"""Many adapters, called as a trace calls functions, over HTTP: what each mechanism brings, from loading on demand up.

Adapters of ranks 8 to 128 on q, k, v lie on moto's S3 server behind a network of 50 MB/s and 20 ms a request, as in
remote_store.py, and are deployed over REST. A node's device holds a tenth of their bytes, its host memory a third, its
disk none; bytes reach the device at the rate at which a rank-64 adapter takes 0.68 of a warm prefill of 256 tokens.
Calls are those of a stretch of the Azure 2019 trace (trace_window.py), faster or slower, so that their rate is
`--utilisation` of the capacity that was measured with everything resident. As many calls precede those that count. Each
row has a new service, with nothing in memory; a round's rows have the same calls. `--rates`: times the rates of network
and link, each with a separate report and as many calls. `--foreign`: foreign.py too. On the disk 1,000 adapters take
8 GB, and as much again as the S3 server keeps them.

`oracle` is `eviction`, but the study orders a prefetch of each adapter 2 s before its call, and once more 0.5 s before:
of what is on the device, the second does nothing. `pinned`: every called adapter is on the device before the first
call. Shares and percentiles are of a round's calls; figures are medians over rounds. `share_of_oracle`: of the cold
calls that `oracle` has less than `eviction`, how many `forecast` has less. `prefetch_wasted`: share of the bytes
prefetched by forecast whose use is decided.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.coldstart.remote_store import DELAY, RATE
from benchmarks.common.adapters import make_adapters
from benchmarks.common.http_service import COSTS, HttpService
from benchmarks.common.invoke import make_prompt, prompt_lengths, until_measured
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, publish, report
from benchmarks.common.s3 import s3_server
from benchmarks.common.slow_link import slow_s3
from benchmarks.many import foreign
from benchmarks.many.cells import ORACLE_LEADS_S, TIES, Limits, Load, measure_limits, run_cell
from benchmarks.many.trace_window import WITHOUT_TOP, draw_window
from garnish.client import Client

RANKS = (8, 16, 32, 64, 128)
LINK_RANK, LINK_TOKENS, LINK_SHARE = 64, 256, 0.68
"""Rank of an adapter whose load takes this share of a warm prefill of these tokens (Toppings: 30 ms of 44)."""
DEVICE_SHARE, HOST_SHARE = 0.1, 1 / 3
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
FILE_ITEM_BYTES = 2
LIMITS = "limits"
FOREIGN = ("ondemand", "forecast")
"""Variants for another project's client. It draws its calls' times itself, so that no oracle could know them."""
SLACK_BYTES = 16 << 20
"""Slack of a pool for whole adapters: their last pages are not full."""


@dataclass(frozen=True)
class Variant:
    """`node`: what serverless.yml says of the node."""

    node: str
    is_announced: bool = False
    resident: bool = False


VARIANTS = {
    "ondemand": Variant("cold_start: wait, eviction: lru, prefetch: 'off'"),
    "pipeline": Variant("cold_start: auto, eviction: lru, prefetch: 'off'"),
    "eviction": Variant("cold_start: auto, eviction: cost, prefetch: 'off'"),
    "forecast": Variant("cold_start: auto, eviction: cost, prefetch: auto"),
    "oracle": Variant("cold_start: auto, eviction: cost, prefetch: 'off'", is_announced=True),
    "pinned": Variant("cold_start: auto, eviction: cost, prefetch: 'off'", resident=True),
}


@dataclass(frozen=True)
class Settings:
    model: Path
    dtype: str
    adapters: int
    calls: int
    """calls of a row that count"""
    rounds: int
    tokens: int
    utilisation: float
    most_prompt: int
    variants: tuple[str, ...]
    rates: tuple[float, ...]
    """factors of the rates of network and link"""
    foreign: Path | None
    """folder in which clients/foreign_clients.py installed vLLM"""
    measured: bool
    """True if the first service waits until its node has measured its costs"""
    seed: int


class Bench:
    """A registry that holds the adapters, behind the slow network, and the services that serve it."""

    def __init__(self, settings: Settings, root: Path, registry: str) -> None:
        self.settings, self._root, self._registry = settings, root, registry
        ranks = [RANKS[i % len(RANKS)] for i in range(settings.adapters)]
        self._paths = make_adapters(settings.model, root / "adapters", ranks, settings.seed, dtype=torch.bfloat16)
        item = ITEM_BYTES[settings.dtype]
        files = [(path / "adapter_model.safetensors").stat().st_size for path in self._paths]
        self.sizes = [size * item // FILE_ITEM_BYTES for size in files]
        """Bytes on the device."""
        largest = 2 * max(self.sizes) + SLACK_BYTES // 16
        self.device = max(round(DEVICE_SHARE * sum(self.sizes)), largest)
        self.host = max(round(HOST_SHARE * sum(self.sizes)), largest)
        self._costs = root / LIMITS / COSTS
        self.link = 0.0
        """Bytes per second; 0: not limited."""
        self.rate = 1.0

    @contextmanager
    def service(self, name: str, node: str, resident: Sequence[str] = ()) -> Iterator[HttpService]:
        """`resident`: functions for which its device has room, whatever else it holds."""
        room = sum(self.sizes[int(function[1:])] for function in set(resident)) * 11 // 10 + SLACK_BYTES
        device = room if resident else self.device
        text = f", adapter_memory: {device}, host_memory: {self.host}, disk_cache: 'off', {node}"
        if self.link:
            text += f", simulate: {{link: {round(self.rate * self.link)}B/s}}"
        root, dtype = self._root / name, self.settings.dtype
        service = HttpService(self.settings.model, [], root, dtype, 0, text, registry=self._registry)
        if self._costs.exists():
            service.use_costs(self._costs)
        with service:
            yield service

    def deploy(self, service: HttpService) -> None:
        with Client(service.url, service.key) as client:
            for i, path in enumerate(self._paths):
                client.deploy(f"a{i}", path)

    def set_link(self, prefill_s: float) -> None:
        self.link = self.sizes[RANKS.index(LINK_RANK)] / (LINK_SHARE * prefill_s)


def study(settings: Settings, root: Path) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Yields, after each row, the report's name, the measured settings, and the rows until then."""
    with s3_server(max(os.sched_getaffinity(0)), in_memory=False) as registry:
        bench = Bench(settings, root, registry)
        loads, limits = _measure(bench)
        bench.set_link(limits.prefill_s)
        gap_s = 1 / (settings.utilisation * limits.capacity)
        for rate in settings.rates:
            rows: list[dict[str, Any]] = []
            bench.rate = rate
            with slow_s3(rate * RATE, DELAY):
                for number, load in enumerate(loads):
                    timed = Load(load.window, load.warmup, gap_s, load.prompts, load.tokens)
                    for name in settings.variants:
                        rows.append(_row(bench, limits, timed, name=name, number=number))
                        yield _name(rate), _measured(bench, loads, limits, gap_s=gap_s), rows
        if settings.foreign is not None:
            rows, bench.rate = [], 1.0
            timed = Load(loads[0].window, 0, gap_s, loads[0].prompts, loads[0].tokens)
            with slow_s3(RATE, DELAY):
                for name in FOREIGN:
                    with bench.service(f"{name}-foreign", VARIANTS[name].node) as service:
                        rows.append({"variant": name, **foreign.foreign_row(service, timed, settings.foreign)})
                    yield "foreign", _measured(bench, loads, limits, gap_s=gap_s), rows


def _name(rate: float) -> str:
    return "" if rate == 1 else f"{rate:g}x"


def _measure(bench: Bench) -> tuple[list[Load], Limits]:
    """Each round's calls, not timed yet, and what the service can do with everything resident."""
    settings = bench.settings
    prompts = [make_prompt(n, settings.seed + i) for i, n in enumerate(prompt_lengths(settings.most_prompt))]
    loads = [
        Load(
            draw_window(settings.adapters, 2 * settings.calls, settings.seed + number), settings.calls, 0.0, prompts,
            settings.tokens,
        )
        for number in range(settings.rounds)
    ]  # fmt: skip
    link_first = sorted(range(len(RANKS)), key=lambda i: RANKS[i] != LINK_RANK)
    ranks = [f"a{i}" for i in link_first]
    long_prompt = make_prompt(min(LINK_TOKENS, settings.most_prompt), settings.seed)
    resident = {*ranks, *loads[0].functions}
    with bench.service(LIMITS, VARIANTS["pinned"].node, sorted(resident)) as service:
        bench.deploy(service)
        if settings.measured:
            asyncio.run(until_measured(service))
        return loads, asyncio.run(measure_limits(service, loads, long_prompt=long_prompt, ranks=ranks))


def _row(bench: Bench, limits: Limits, load: Load, *, name: str, number: int) -> dict[str, Any]:
    variant, tie = VARIANTS[name], TIES[bench.settings.dtype]
    resident = load.functions if variant.resident else []
    with bench.service(f"{name}-{number}-{bench.rate:g}", variant.node, resident) as service:
        cell = run_cell(service, load, limits, is_announced=variant.is_announced, resident=variant.resident, tie=tie)
        return {"variant": name, "round": number, "rate": bench.rate, **asyncio.run(cell)}


def _measured(bench: Bench, loads: Sequence[Load], limits: Limits, *, gap_s: float) -> dict[str, Any]:
    return {
        "bytes": sum(bench.sizes), "device_bytes": bench.device, "host_bytes": bench.host,
        "rate": bench.rate, "link_bytes_s": bench.rate * bench.link, "store_bytes_s": bench.rate * RATE,
        "store_delay_s": DELAY,
        "capacity_calls_s": limits.capacity, "calls_s": 1 / gap_s, "prefill_256_s": limits.prefill_s,
        "warm_ttft_s": [ttft for ttft, _ in limits.warm], "warm_e2e_s": [e2e for _, e2e in limits.warm],
        "called_adapters": [len(load.functions) for load in loads],
        "faster_than_trace": [load.window.seconds / (len(load.planned) * gap_s) for load in loads],
    }  # fmt: skip


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over rounds, by variant; wrong tokens and ties of all rows. Times are in ms."""
    figures: dict[str, float] = {}
    for variant in dict.fromkeys(row["variant"] for row in rows):
        of = [row for row in rows if row["variant"] == variant]
        for figure in ("cold_share", "goodput"):
            figures[f"{figure}_{variant}"] = median(row[figure] for row in of)
        for kind in ("ttft", "e2e"):
            figures[f"{kind}_p95_{variant}"] = median(row[f"{kind}_p95_ms"] for row in of)
    for figure in ("wrong_tokens", "ties"):
        figures[figure] = sum(row[figure] for row in rows)
    return figures | _compared(rows)


def _compared(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Compares `forecast` with other variants: medians of ratios in one round; cold calls of all rounds."""
    of = {name: [row for row in rows if row["variant"] == name] for name in VARIANTS}
    ours, figures = of["forecast"], {}
    if not ours:
        return {}
    for figure, key in (("goodput", "goodput"), ("ttft_p95", "ttft_p95_ms")):
        pairs = zip(ours, of["ondemand"], strict=False)
        if ratios := [mine[key] / base[key] for mine, base in pairs if base[key]]:
            figures[f"{figure}_over_ondemand"] = median(ratios)
    kinds = ("useful", "late", "wasted")
    sums = {kind: sum(row[f"prefetch_{kind}_bytes"] for row in ours) for kind in kinds}
    figures["prefetch_wasted"] = sums["wasted"] / max(1, sum(sums.values()))
    cold = {name: sum(row["cold_share"] for row in each) for name, each in of.items()}
    if of["eviction"] and of["oracle"] and cold["eviction"] > cold["oracle"]:
        spared = cold["eviction"] - cold["forecast"]
        figures["share_of_oracle"] = spared / (cold["eviction"] - cold["oracle"])
    return figures


def _settings(options: argparse.Namespace) -> Settings:
    quick, variants = options.quick, tuple(options.variants)
    if quick and len(variants) == len(VARIANTS):
        variants = ("ondemand", "forecast")
    return Settings(
        model=options.model,
        dtype=options.dtype,
        adapters=6 if quick else options.adapters,
        calls=8 if quick else options.calls,
        rounds=1 if quick else options.rounds,
        tokens=4 if quick else 16,
        utilisation=options.utilisation,
        most_prompt=64 if quick else 1024,
        variants=variants,
        rates=tuple(options.rates),
        foreign=options.foreign and options.foreign.absolute(),
        measured=not quick,
        seed=options.seed,
    )


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--dtype", choices=list(ITEM_BYTES), default="bfloat16", help="of the base and the device pool")
    parser.add_argument("--adapters", type=int, default=128)
    parser.add_argument("--calls", type=int, default=200, help="of a row that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--utilisation", type=float, default=0.5)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="of network and link, times the usual")
    parser.add_argument(
        "--foreign", type=Path, metavar="DIR", help="vLLM's client as well, as foreign_clients installed it"
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    settings = _settings(options)
    probe = ContentionProbe()
    stated = asdict(settings) | {"model": settings.model.name, "ranks": RANKS, "warmup_calls": settings.calls}
    stated |= {"oracle_leads_s": ORACLE_LEADS_S, "tie": TIES[settings.dtype], "without_top": WITHOUT_TOP}
    stated |= {"nodes": {name: VARIANTS[name].node for name in settings.variants}}
    del stated["foreign"]
    with tempfile.TemporaryDirectory() as root:
        for what, measured, rows in study(settings, Path(root)):
            figures = foreign.figures_of(rows) if what == "foreign" else figures_of(rows)
            document = report("many", stated | measured | probe.values(), settings.seed, rows, figures)
            file: Path | None = options.json
            publish(document, file.with_stem(f"{file.stem}_{what}") if file is not None and what else file)


if __name__ == "__main__":
    main()
