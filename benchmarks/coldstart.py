"""Cold starts in one engine on a CPU: every way of loading over the same calls, against adapters that are all resident.

The link between host memory and "device" is simulated: a rank-64 q,k,v adapter takes 0.68 of a warm prefill of 256
tokens to cross it, the papers' 30 ms to 44 ms. The engine has one core, a CPU worker and the loaders the other. All
adapters lie in host memory; every variant gets the same calls (workloads.py), in rounds that alternate the variants.
TTFT counts from the time at which a call was due. Two columns: CPU workers as fast as they are here, and slowed until
worker time : prefill is the papers' 27 : 44.

Each part's result is kept in FILE.parts as it ends, and a run with the same options goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.cold_bench import LOAD_OVER_PREFILL, WORKER_OVER_PREFILL, Bench
from benchmarks.cold_busy import busy_figures, busy_host
from benchmarks.cold_ranks import BATCHES, RANKS, ranks, ranks_figures
from benchmarks.cold_settings import CALLS_SHARE, MEAN_OUTPUT, figures_of, run_setting, variants_of
from benchmarks.cold_single import (
    GRID,
    PIPELINING_RANKS,
    QUICK_GRID,
    interruption_figures,
    interruptions,
    pipelining,
    pipelining_figures,
    regret,
    regret_figures,
)
from benchmarks.cold_stream import streaming, streaming_figures
from benchmarks.report import ROOT, arguments, contention_probe, publish, report
from benchmarks.workloads import SETTINGS
from node_agent.cores import spare_cores

SHARES = {
    "S1": 14, "S2": 7, "S3": 16, "S3-azure": 9, "S3-long": 11, "S4": 15, "MAF-128": 5, "MAF-256": 11, "MAF-256-25": 5,
    "MAF-512": 6, "MIX": 11, "pipelining": 3, "ranks": 3, "regret": 10, "interruptions": 10, "stream": 9, "busy": 12,
}  # fmt: skip
"""The parts of the study, and the share of its time that each gets; any other setting gets as much as S1."""
OWN_ENGINES = ("stream", "busy")
"""Parts that start engines of their own."""
QUICK = "S3,MAF-512,ranks,pipelining,regret,interruptions,stream"
FIGURES: dict[str, Callable[[dict[str, Any]], dict[str, float]]] = {
    "pipelining": pipelining_figures, "regret": regret_figures, "interruptions": interruption_figures,
    "stream": streaming_figures, "busy": busy_figures, "ranks": ranks_figures,
}  # fmt: skip


MANY = 8
"""Adapters of rank 64, which most parts call: a variant forgets its device, so that rounds can use the same ones."""

AT_ONCE = 3
"""Times the calls of other parts, where calls are to meet: only many at once are interrupted by each other's loads."""


class Study:
    """Its engines are started when the first part needs them."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options, self.root, self.model = options, root, Path(options.model).absolute()
        self.columns: list[str] = options.columns.split(",")
        self._bench: Bench | None = None

    @property
    def bench(self) -> Bench:
        if self._bench is None:
            wanted = {64: max(MANY, AT_ONCE * self.options.calls)}
            for part in self.parts:
                wanted |= {rank: max(count, wanted.get(rank, 0)) for rank, count in self._adapters(part).items()}
            self._bench = Bench(self.model, self.root / "bench", self.options.seed, wanted)
        return self._bench

    def _adapters(self, part: str) -> dict[int, int]:
        """How many of each rank a round of the part calls."""
        if part == "ranks":
            return {rank: max(1, *(batch.count(rank) for batch in BATCHES.values())) for rank in RANKS}
        if part not in SETTINGS:
            return dict.fromkeys(PIPELINING_RANKS if part == "pipelining" else (64,), 1)
        calls: int = self.options.calls
        count = max(1, round(calls * CALLS_SHARE[SETTINGS[part].lengths]))
        return dict.fromkeys(SETTINGS[part].ranks, count)

    @property
    def parts(self) -> list[str]:
        names: list[str] = self.options.settings.split(",")
        return names

    def prepare(self, part: str) -> None:
        """Starts the engines that the part needs, which takes none of its time."""
        if part not in OWN_ENGINES:
            _ = self.bench

    def run(self, part: str, until: float) -> dict[str, Any]:
        options = self.options
        rounds, calls, seed = options.rounds, options.calls, options.seed
        if part == "stream":
            row = streaming(self.model, self.root / "stream", rounds, seed, until)
        elif part == "busy":
            self.close()  # its services would inherit the core that an engine with workers leaves this process
            row = busy_host(self.model, self.root / "busy", rounds, calls, seed, until)
        elif part == "pipelining":
            row = pipelining(self.bench, self.columns, rounds, until)
        elif part == "regret":
            row = regret(self.bench, self.columns[-1:], rounds, until, QUICK_GRID if options.quick else GRID)
        elif part == "ranks":
            row = ranks(self.bench, rounds, until)
        elif part == "interruptions":
            row = interruptions(self.bench, AT_ONCE * calls, rounds, seed, until)
        else:
            setting = SETTINGS[part]
            row = run_setting(self.bench, setting, variants_of(setting, self.columns), rounds, calls, seed, until)
        bench = self._bench
        if bench is not None:
            row |= {"warm_prefill_256_s": bench.prefill, "link_bytes_s": bench.link.bandwidth}
            row |= {"repeats": bench.repeats, "worker_over_prefill": bench.worker_over_prefill}
        return row

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()
            self._bench = None


def run_parts(study: Study, kept: Path | None) -> list[dict[str, Any]]:
    """Every part, in a share of the time that is left when it begins."""
    options = study.options
    end, left = time.monotonic() + 60 * options.minutes, list(study.parts)
    rows = _kept(kept, study)
    while left:
        part = left[0]
        if not any(row["part"] == part for row in rows):
            share = SHARES.get(part, SHARES["S1"]) / sum(SHARES.get(name, SHARES["S1"]) for name in left)
            study.prepare(part)
            begin, probe = time.monotonic(), contention_probe()
            row = study.run(part, begin + share * (end - begin))
            row |= {"seconds": time.monotonic() - begin, "probe_before_ms": probe, "probe_after_ms": contention_probe()}
            rows.append(row)
            print(f"{part}: {row['seconds']:.0f} s", file=sys.stderr, flush=True)
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps({"key": _key(study), "rows": rows}))
        left.pop(0)
    return rows


def _key(study: Study) -> dict[str, Any]:
    """What parts of one report must have in common."""
    options = study.options
    return {name: getattr(options, name) for name in ("columns", "calls", "rounds", "seed", "quick", "model")}


def _kept(file: Path | None, study: Study) -> list[dict[str, Any]]:
    if file is None or not file.exists():
        return []
    found = json.loads(file.read_text())
    return [row for row in found["rows"] if row["part"] in study.parts] if found["key"] == _key(study) else []


def document(study: Study, rows: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, float] = {}
    for row in rows:
        figures |= FIGURES.get(row["part"], figures_of)(row)
    figures["probe_before_ms"] = rows[0]["probe_before_ms"]
    figures["probe_after_ms"] = rows[-1]["probe_after_ms"]
    figures["probe_max_ms"] = max(row[f"probe_{when}_ms"] for row in rows for when in ("before", "after"))
    options = study.options
    settings = {
        "model": study.model.name, "dtype": "bfloat16", "engine_cores": 1, "worker_cores": 1,
        "load_over_prefill": LOAD_OVER_PREFILL, "worker_over_prefill_slowed": round(WORKER_OVER_PREFILL, 3),
        "mean_output": MEAN_OUTPUT, "rounds": options.rounds, "calls": options.calls, "calls_share": CALLS_SHARE,
        "columns": study.columns, "parts": study.parts, "quick": options.quick,
    }  # fmt: skip
    return report("coldstart", settings, options.seed, rows, figures, simulated=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--settings", help=f"of {', '.join(dict.fromkeys([*SHARES, *SETTINGS]))}")
    parser.add_argument("--columns", default="fast,slowed", help="of fast, slowed: the CPU workers' speed")
    parser.add_argument("--rounds", type=int, default=5, help="of every part, as far as its time allows")
    parser.add_argument("--calls", type=int, default=6, help="in each round of a setting with short prompts")
    parser.add_argument("--minutes", type=float, default=23, help="for all parts; no round is cut short")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.calls = 1, 3
    options.settings = options.settings or (QUICK if options.quick else ",".join(SHARES))
    unknown = [name for name in options.settings.split(",") if name not in SHARES and name not in SETTINGS]
    if unknown or not set(options.columns.split(",")) <= {"fast", "slowed"}:
        parser.error(f"unknown: {unknown or options.columns}")
    if not spare_cores(1):
        parser.error("two cores are needed: one for the engine, one for a CPU worker")
    return options


def main() -> None:
    options = parse()
    kept = None if options.json is None else options.json.with_name(options.json.name + ".parts")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        study = Study(options, Path(root))
        try:
            rows = run_parts(study, kept)
        finally:
            study.close()
        publish(document(study, rows), options.json)
    if kept is not None:
        kept.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
