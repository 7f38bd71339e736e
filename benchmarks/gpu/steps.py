"""Decode steps and prompts of a whole model on a GPU, over what they must read and compute; and what adapters add.

Passes are timed as the engine computes them, from its rows to its tokens. The floor of a decode step is the time in
which the device copies as many bytes as the step must read: weights, keys and values, adapters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from adapters.base_sizes import sizes_from_config
from benchmarks.gpu.engine import EngineBox, adapter_bytes
from benchmarks.gpu.parts import Skipped
from cluster.performance_fit import BadSample, DecodeSample, fit_paper_form
from node_agent.device import device_seconds
from node_agent.performance.cases import Case, CaseRow, Effort
from node_agent.performance.sweep import TARGETS, Bench, bench
from node_agent.runner.lora_choice import TRITON_KERNELS
from tests.support.local_engine import LocalEngine

SEVEN = tuple(range(7))
TARGET_NAMES = {TARGETS: "q,k,v", SEVEN: "all seven"}
COPY_BYTES, PEAK_WIDTH = 1 << 30, 8192
SERVED_TOKENS = 32
ROW_TOKENS = 128
"""Tokens of the cache for each row; half of them are for a few long rows, which `bench` keeps."""
PREFILL_RANK = 64


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of large copies; median."""
    source = torch.zeros(COPY_BYTES if device.type == "cuda" else 1 << 22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median(device_seconds(device, partial(target.copy_, source)) for _ in range(9))


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the median rate of a large product of drawn numbers; equal ones would draw less power, and run faster."""
    width = PEAK_WIDTH if device.type == "cuda" else 128
    a = torch.randn(width, width, dtype=dtype, device=device)
    return 2 * width**3 / median(device_seconds(device, partial(torch.mm, a, a)) for _ in range(9))


def timed(passes: Bench, case: Case, rounds: int) -> float:
    """Seconds; median of the rounds but the first."""
    return median([passes.run(case).seconds for _ in range(rounds)][1:])


def decode(box: EngineBox, until: float) -> Iterator[dict[str, Any]]:
    """A decode step of each number of rows, and the same rows served: tokens of requests that run together."""
    engine, scale, bandwidth = box.get(), box.scale, copy_bandwidth(box.device)
    yield {"copy_gb_s": bandwidth / 1e9}
    for rows in scale.rows:
        effort = Effort((rows,), (), 1, (), scale.rounds, max(16 * scale.context, ROW_TOKENS * rows))
        with bench(engine.engine, engine.base, effort, written=box.written) as passes:
            if rows > len(passes.bounds.contexts):
                yield {"left_out": rows, "why": f"the cache has room for {len(passes.bounds.contexts)} rows"}
                continue
            context = min(scale.context, passes.bounds.contexts[rows - 1] - 1)
            seconds = timed(passes, Case(True, tuple(CaseRow(context, 1, -1) for _ in range(rows))), scale.rounds)
        floor_s = (read_bytes(engine) + kv_bytes(engine, rows * context)) / bandwidth
        yield {
            "rows": rows, "context": context, "ms": seconds * 1e3, "floor_ms": floor_s * 1e3,
            "over_floor": seconds / floor_s, "served_ms": _served_step(engine, rows) * 1e3,
        }  # fmt: skip
        if time.monotonic() > until:
            return


def graphs(box: EngineBox, until: float) -> Iterator[dict[str, Any]]:
    """Decode steps replayed from captured graphs, and the same ones launched kernel by kernel. Raises Skipped for a
    runner that captures none."""
    engine = box.get()
    runner: Any = engine.engine.runner
    captured = getattr(runner, "buckets", None)
    if not captured:
        raise Skipped(f"runner {box.runner} captures no graphs")
    for rows in sorted({1, min(32, max(box.scale.rows)), max(box.scale.rows)}):
        effort = Effort((rows,), (), 1, (), box.scale.rounds, ROW_TOKENS * rows)
        with bench(engine.engine, engine.base, effort, written=box.written) as passes:
            case, seconds = Case(True, tuple(CaseRow(16, 1, -1) for _ in passes.bounds.contexts)), dict[bool, float]()
            for on in (True, False):
                runner.buckets = captured if on else []
                seconds[on] = timed(passes, case, box.scale.rounds)
            runner.buckets = captured
        yield {"rows": len(case.rows), "on_ms": seconds[True] * 1e3, "off_ms": seconds[False] * 1e3}
        if time.monotonic() > until:
            return


def _served_step(engine: LocalEngine, rows: int) -> float:
    """Returns the mean seconds between tokens of `rows` requests, from the last one's first token on."""
    calls = [engine.submit([1, 2, 3, 4], SERVED_TOKENS, ignore_eos=True, timeout=120.0) for _ in range(rows)]
    engine.run(limit=120.0)
    outcomes = [engine.outcomes.pop(call) for call in calls]
    if any(len(outcome.tokens) != SERVED_TOKENS for outcome in outcomes):
        raise RuntimeError(f"requests ended with {[outcome.finished for outcome in outcomes][:3]}")
    begin, end = max(outcome.times[0] for outcome in outcomes), max(outcome.times[-1] for outcome in outcomes)
    return (end - begin) / (SERVED_TOKENS - 1)


def read_bytes(engine: LocalEngine) -> int:
    """Returns the bytes of weights that a step of few rows reads: of the embedding only some rows."""
    config = json.loads((engine.model_dir / "config.json").read_text())
    tied = bool(config.get("tie_word_embeddings"))
    unread = 0 if tied else int(config["vocab_size"]) * int(config["hidden_size"])
    sizes = sizes_from_config(config)
    itemsize: int = engine.engine.runner.dtype.itemsize
    return (sizes.linear + sizes.rest - unread) * itemsize


def kv_bytes(engine: LocalEngine, tokens: int) -> int:
    return engine.base.kv_elements * engine.engine.runner.dtype.itemsize * tokens


def prefill(box: EngineBox, until: float) -> Iterator[dict[str, Any]]:
    """Prompts without an adapter as a share of the peak of large products, and with one over that."""
    engine, scale = box.get(), box.scale
    peak = peak_flops(box.device, engine.engine.runner.dtype)
    yield {"peak_tflops": peak / 1e12}
    effort = Effort(
        (1,), (min(PREFILL_RANK, max(scale.ranks)),), 1, scale.prompts, scale.rounds, 2 * max(scale.prompts)
    )
    with bench(engine.engine, engine.base, effort, written=box.written) as passes:
        for tokens in scale.prompts:
            if tokens > passes.bounds.contexts[0]:
                yield {"left_out": tokens, "why": f"the cache has room for {passes.bounds.contexts[0]} tokens"}
                continue
            plain, adapted = (
                timed(passes, Case(False, (CaseRow(0, tokens, adapter),)), scale.rounds) for adapter in (-1, 0)
            )
            yield {
                "tokens": tokens, "rank": passes.bounds.ranks[0], "ms": plain * 1e3, "lora_ms": adapted * 1e3,
                "share_of_peak": prompt_flops(engine, tokens) / plain / peak, "lora_over_base": adapted / plain,
            }  # fmt: skip
            if time.monotonic() > until:
                return


def prompt_flops(engine: LocalEngine, tokens: int) -> float:
    """Returns the operations of the layers' products and of causal attention, without the head's one row."""
    base = engine.base
    products = sum(d_in * d_out for d_in, d_out in base.widths)
    return base.num_layers * (2.0 * products * tokens + 2.0 * base.widths[0][1] * tokens**2)


def lora(box: EngineBox, until: float) -> Iterator[dict[str, Any]]:
    """Yields what adapters add to a decode step, by kernel, over the time of their bytes.

    A row for each kernel says how well the forms of Toppings' equation 2 describe it.
    """
    kernels = TRITON_KERNELS if box.device.type == "cuda" else ("auto",)
    for number, kernel in enumerate(kernels):
        ends = time.monotonic() + (until - time.monotonic()) / (len(kernels) - number)
        try:
            yield from _lora_of(box, kernel, ends)
        except Skipped as why:
            yield {"kernel": kernel, "skipped": str(why)}


def _lora_of(box: EngineBox, kernel: str, ends: float) -> Iterator[dict[str, Any]]:
    """Keeps the engine no longer than it runs: the device has no room for two."""
    engine, samples = box.get(kernel), list[DecodeSample]()
    for targets, count in ((targets, count) for targets in TARGET_NAMES for count in box.scale.adapters):
        if time.monotonic() > ends:
            yield {"kernel": kernel, "left_out": f"{count} adapters on {TARGET_NAMES[targets]}"}
            continue
        for row, sample in _lora_steps(box, engine, targets, count):
            yield {"kernel": engine.engine.lora_kernel, **row}
            if targets == TARGETS:
                samples.append(sample)
    yield {"kernel": engine.engine.lora_kernel, "paper_r2": _paper_r2(samples)}


def _lora_steps(
    box: EngineBox, engine: LocalEngine, targets: tuple[int, ...], count: int
) -> Iterator[tuple[dict[str, Any], DecodeSample]]:
    """Steps of `count` rows: without adapters, with a distinct one each of every rank, and of all ranks in turn."""
    scale, bandwidth = box.scale, copy_bandwidth(box.device)
    mixes: list[Sequence[int]] = [(rank,) for rank in scale.ranks]
    for ranks in [*mixes, scale.ranks]:
        effort = Effort((count,), tuple(ranks), 1, (), scale.rounds, ROW_TOKENS * count)
        with bench(engine.engine, engine.base, effort, written=box.written, targets=targets) as passes:
            if len(passes.bounds.ranks) < count:
                continue  # there is no room for as many of this rank
            context = passes.bounds.contexts[-1] - 1
            plain = timed(passes, Case(True, tuple(CaseRow(context, 1, -1) for _ in range(count))), scale.rounds)
            with_adapters = Case(True, tuple(CaseRow(context, 1, i) for i in range(count)))
            runs = [passes.run(with_adapters) for _ in range(scale.rounds)][1:]
            used = passes.bounds.ranks[:count]
        (first, *_), seconds = runs, median(run.seconds for run in runs)
        floor_s = sum(adapter_bytes(engine.engine.store, rank, targets) for rank in used) / bandwidth
        assert isinstance(first, DecodeSample)
        yield {
            "adapters": count, "targets": TARGET_NAMES[targets], "rank": ranks[0] if len(ranks) == 1 else "mixed",
            "base_ms": plain * 1e3, "ms": seconds * 1e3, "floor_ms": floor_s * 1e3, "over_base": seconds / plain,
        }, DecodeSample(**{name: getattr(first, name) for name in COUNTS}, seconds=seconds)  # fmt: skip


COUNTS = tuple(name for name in DecodeSample.__struct_fields__ if name != "seconds")


def _paper_r2(samples: Sequence[DecodeSample]) -> dict[str, float] | str:
    """Returns R^2 by form, or the reason for which there is none."""
    try:
        return {kernel: fit_paper_form(samples, kernel).r2 for kernel in ("bgmv", "mbgmv")}
    except BadSample as error:
        return str(error)
