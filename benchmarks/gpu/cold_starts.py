"""Cold starts on a GPU, in parts of suite.py: exact first, then a 7B-shaped random model over link rates, prompts,
ranks and loads at once.

All adapters lie in pinned host memory. Copies are real; below the full rate each layer is also delayed so that loads
and handoffs together move no more bytes per second than named. `cached` has the adapters on
the device; `assist_pipeline` and the others of WAYS are forced plans, `full` is the planner's choice, and
`planner_regret` how much later it ends than the best of them. `synced` hands over by copies that the host waits for.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.common.report import ROOT
from benchmarks.gpu.baselines import plain_torch, synced
from benchmarks.gpu.cold_rig import WAYS, Bench, all_handed_over, build
from benchmarks.gpu.parts import Part, Skipped
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.stream import StreamPool
from node_agent.cores import usable_cores
from node_agent.device import device_seconds
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally
from tests.support.forced import force
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import TIE, PeftReference, draw_adapter, make_adapter
from tests.support.random_model import HALF_TOLERANCE, write_half_llama
from tests.support.worker_counters import counters_of

PARTS = ("exact", "same", "handoff", "points", "loads")
PLANS = ("overlap", "pipeline", "assist_pipeline")
"""Plans from which the planner chooses."""
ROUNDS = 3
ADAPTERS = {64: 32, 32: 1, 256: 1, 128: 1}
"""Number of adapters by rank, the most important first. Toppings' S2 and S3 have rank 64, S1 32 and S4 256."""
QUICK_ADAPTERS = {64: 2, 128: 1}


def exact(root: Path, device: str, runner: str, adapters: int, seed: int, until: float) -> Iterator[dict[str, Any]]:
    """Tokens of stories260K in fp32 against PEFT alone: drawn adapters, plans, arrivals, workers that fail. LightLLM,
    whose kernels take neither fp32 nor heads so narrow, gets a drawn Llama in fp16."""
    half = runner == "lightllm"
    model = write_half_llama(root / "half", 512) if half else _stories(root)
    rng, tally, counts = random.Random(seed), Tally(tie=2 * HALF_TOLERANCE if half else TIE), Counter[str]()
    workers = 1 if usable_cores() < 3 else 2
    engine = LocalEngine(
        model, root / "exact", device=device, runner=runner, dtype="float16" if half else "float32", threads=1,
        block_tokens=4, max_rows=16, adapter_memory=4 << 20, host_memory=64 << 20, kv_memory=64 << 20,
        cpu_workers=workers, prefix_cache="auto",
    )  # fmt: skip
    try:
        force(engine.engine, random.Random(seed + 1), faults=0.02)
        kinds = [Case(None, None, [], 0)]
        for i in range(adapters):
            path = make_adapter(model, root / f"drawn{i}", i, **draw_adapter(rng, engine.base.num_layers))
            kinds.append(Case(path, engine.deploy(path), [], 0))
        reference = PeftReference(model)
        problems: list[str] = []
        while time.monotonic() < until or not tally.cases:
            problems += run_batch(rng, engine, reference, kinds, tally, counts)
        yield {**vars(tally), **counts, "problems": problems[:20]}
    finally:
        engine.close()


def _stories(root: Path) -> Path:
    model = root / "stories260K"
    script = [sys.executable, str(ROOT / "examples" / "models" / "convert_stories.py"), str(model)]
    subprocess.run(script, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return model


def same(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """The 7B shape in bf16: a cold prompt's tokens against the same engine's warm ones, and against plain torch LoRA.

    Drawn weights make close calls, so tokens may differ by rounding; the first token's log probability shows how much.
    """
    for rank, tokens in product(bench.adapters, (64, 512)):
        adapter, prompts = bench.adapters[rank][:1], bench.prompts(tokens, 1)
        bench.forget()
        with all_handed_over(bench):
            (cold,) = bench.serve(WAYS["assist"], adapter, prompts, 8)
        (warm,) = bench.serve(WAYS["cached"], adapter, prompts, 8)
        with plain_torch(bench.engine.engine):
            (plain,) = bench.serve(WAYS["cached"], adapter, prompts, 8)
        (base,) = bench.serve(WAYS["cached"], [None], prompts, 8)  # type: ignore[list-item]
        yield {
            "rank": rank, "tokens": tokens, "layers_cpu": cold[3].layers_cpu, "replays": cold[3].replays,
            "cold_equals_warm": sum(a == b for a, b in zip(cold[1], warm[1], strict=True)),
            "warm_equals_plain": sum(a == b for a, b in zip(warm[1], plain[1], strict=True)),
            "base_equals_plain": sum(a == b for a, b in zip(base[1], plain[1], strict=True)), "of": 8,
            "cold_warm_logprob": abs(cold[2][0].logprob - warm[2][0].logprob),
            "warm_plain_logprob": abs(warm[2][0].logprob - plain[2][0].logprob),
        }  # fmt: skip
        if time.monotonic() > until:
            return


def handoff(bench: Bench, until: float) -> Iterator[dict[str, Any]]:
    """Empty round trips on the stream, and a prompt whose every layer is handed over: on the stream, or by the host."""
    rank, pool = next(iter(bench.adapters)), bench.pool
    if pool is None:
        raise Skipped("the engine has no CPU workers on a stream here")
    width = bench.engine.base.hidden_size
    for tokens in (1, 16, 256):
        x = torch.zeros(tokens, width, dtype=torch.bfloat16, device=pool.device)
        pool.arm()
        times = [device_seconds(pool.device, partial(_round_trip, pool, x)) for _ in range(220)][20:]
        pool.disarm()
        p50, p99 = np.percentile(times, (50, 99)) * 1e6
        yield {"roundtrip_tokens": tokens, "p50_us": float(p50), "p99_us": float(p99), "workers": pool.layout.workers}
    with all_handed_over(bench):
        for tokens in (64, 256, 1024):
            adapter = bench.adapters[rank][:1]
            each: dict[str, list[float]] = {"stream": [], "synced": []}
            for _ in range(ROUNDS + 2):
                prompts = bench.prompts(tokens, 1)
                each["stream"].append(bench.ttft("assist", adapter, prompts))
                with synced(pool):
                    each["synced"].append(bench.ttft("assist", adapter, prompts))
            yield {"synced_tokens": tokens, **{f"{name}_ms": median(times[1:]) * 1e3 for name, times in each.items()}}
            if time.monotonic() > until:
                return


def _round_trip(pool: StreamPool, x: torch.Tensor) -> None:
    one = pool.begin_pass()
    segment = Segment(0, x.shape[0], max(1, x.shape[0] // pool.layout.workers))
    handed_over = one.open(x, [segment], 0, None) if one is not None else None
    if one is None or handed_over is None:
        raise RuntimeError(f"a handoff failed: {counters_of(pool)}")
    handed_over.wait()
    one.end()


def compare(bench: Bench, rank: int, tokens: int, rate: float | None, loads: int) -> dict[str, Any]:
    """Every way at one point: medians over rounds of the mean time to the first token, in ms."""
    adapters = bench.adapters[rank][:loads]
    each: dict[str, list[float]] = {name: [] for name in WAYS}
    bench.set_rate(None)
    bench.serve(WAYS["overlap"], adapters, bench.prompts(tokens, loads))  # all resident, and this length seen before
    bench.set_rate(rate)
    bench.measure_kind(rank, tokens)
    for _ in range(ROUNDS):
        prompts = bench.prompts(tokens, loads)
        for name, times in each.items():  # `cached` comes first, after a way that has left the adapters there
            times.append(bench.ttft(name, adapters, prompts))
    bench.set_rate(None)
    row: dict[str, Any] = {"rank": rank, "tokens": tokens, "gb_s": None if rate is None else rate / 1e9, "loads": loads}
    return row | {f"{name}_ms": median(times) * 1e3 for name, times in each.items()}


def points(bench: Bench, quick: bool, until: float) -> Iterator[dict[str, Any]]:
    """Yields rows of one load, the extreme rates first, so that points left out lie in between."""
    rates = (None, 1e9) if quick else (None, 1e9, 4e9, 16e9, 2e9, 8e9)
    lengths = (64,) if quick else (256, 64, 1024, 512, 2048)
    for rate, tokens, rank in product(rates, lengths, bench.adapters):
        if time.monotonic() > until:
            yield {"left_out": "point", "rank": rank, "tokens": tokens, "gb_s": None if rate is None else rate / 1e9}
        else:
            yield compare(bench, rank, tokens, rate, 1)


def several(bench: Bench, quick: bool, until: float) -> Iterator[dict[str, Any]]:
    """Yields rows of loads that begin together, each for a separate request."""
    rank = next(iter(bench.adapters))
    for loads, rate in product((2,) if quick else (4, 16, 32, 8, 2), (None, 4e9)):
        if time.monotonic() > until:
            yield {"left_out": "loads", "loads": loads, "gb_s": None if rate is None else rate / 1e9}
        else:
            yield compare(bench, rank, 16 if quick else 256, rate, loads)


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Names: `_r` rank, `_t` prompt tokens, `_gbs` link rate, `_n` loads at once."""
    figures: dict[str, float] = {}
    regrets = []
    for row in rows:
        if "cached_ms" in row:
            rate = "full" if row["gb_s"] is None else f"{row['gb_s']:g}"
            where = f"r{row['rank']}_t{row['tokens']}_gbs{rate}_n{row['loads']}"
            for name in WAYS:
                if name != "cached":
                    figures[f"ttft_over_cached_{name}_{where}"] = row[f"{name}_ms"] / row["cached_ms"]
            regrets.append(row["full_ms"] / min(row[f"{name}_ms"] for name in PLANS) - 1)
        elif "roundtrip_tokens" in row:
            figures[f"roundtrip_p50_us_{row['workers']}_t{row['roundtrip_tokens']}"] = row["p50_us"]
        elif "synced_tokens" in row:
            figures[f"syncfree_over_sync_{row['synced_tokens']}"] = row["synced_ms"] / row["stream_ms"]
        elif "mismatches" in row:
            figures |= {name: row[name] for name in ("cases", "tokens", "mismatches", "ties")}
    if regrets:
        figures |= {"planner_regret": max(regrets), "planner_regret_median": median(regrets)}
    return figures


class ColdStudy:
    """The parts, and the 7B-shaped engine that all but the first share, built by the first that wants it."""

    def __init__(self, root: Path, shape: str, device: str, runner: str, *, quick: bool, seed: int) -> None:
        self.root, self.shape, self.device, self.runner = root, shape, device, runner
        self.quick, self.seed = quick, seed
        self._built: Bench | None = None

    def parts(self) -> dict[str, Part]:
        return {
            "exact": lambda until: exact(
                self.root, self.device, self.runner, 2 if self.quick else 12, self.seed, until
            ),
            "same": self._with_profile,
            "handoff": lambda until: handoff(self._bench(), until),
            "points": lambda until: points(self._bench(), self.quick, until),
            "loads": lambda until: several(self._bench(), self.quick, until),
        }

    def close(self) -> None:
        """Gives the device's memory back. No part can follow that shares the engine."""
        built, self._built = self._built, None
        if built is not None:
            built.engine.close()

    def _bench(self) -> Bench:
        if self._built is None:
            if (self.root / self.shape).exists():
                raise RuntimeError("the engine could not be built, as an earlier part says")
            adapters = QUICK_ADAPTERS if self.quick else ADAPTERS
            self._built = build(self.root, self.shape, self.device, adapters, self.seed, self.runner)
        return self._built

    def _with_profile(self, until: float) -> Iterator[dict[str, Any]]:
        built = self._bench()
        profile = msgspec.to_builtins(built.engine.engine.cold_start.profile)
        yield {"profile": profile, "kernels": type(getattr(built.pool, "kernels", None)).__name__}
        yield from same(built, until)
