"""Writes the figures of README and docs from the reports in benchmarks/results/, between their markers.

The rule by which a figure is stated is in benchmarks/rule.py, for readers in docs/results/benchmarks.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import front_page
from benchmarks.ablation_tables import confirmed_table, length_table, screen_table
from benchmarks.autoscale_report import autoscale_text
from benchmarks.batch_tables import batches_table
from benchmarks.cold_tables import remote_store_table
from benchmarks.default_tables import default_table
from benchmarks.engine_tables import engine_table, neighbours_table, serve_table
from benchmarks.eviction_tables import eviction_table, eviction_traces_table
from benchmarks.forecast_tables import (
    cost_table,
    day_table,
    drift_table,
    function_table,
    popularity_table,
    time_table,
    window_table,
)
from benchmarks.front_page import ENGINE, SERVE, Reports
from benchmarks.gateway_tables import (
    control_plane_table,
    gateway_table,
    placement_table,
    random_keys_table,
    scale_table,
)
from benchmarks.gpu_tables import (
    gpu_aims_table,
    gpu_decode_table,
    gpu_exact_table,
    gpu_kernels_table,
    gpu_loads_table,
    gpu_lora_table,
    gpu_merged_table,
    gpu_points_table,
    gpu_prefill_table,
    gpu_regret_text,
    gpu_service_table,
    gpu_ttft_table,
    plan_replay_table,
)
from benchmarks.kernel_tables import cpu_table, floor_table, resource_table, steps_table
from benchmarks.link_tables import border_table, bound_table, link_table
from benchmarks.many_foreign import foreign_table
from benchmarks.many_tables import many_table
from benchmarks.memory_tables import memory_settings_table, memory_table
from benchmarks.perfmodel_report import perfmodel_table
from benchmarks.prefetch_tables import prefetch_table
from benchmarks.prefix_tables import prefix_cache_table
from benchmarks.report import RESULTS, ROOT, caption
from benchmarks.rule import table, wrapped
from benchmarks.scheduling_tables import fidelity_table, scheduling_table
from benchmarks.service_tables import chaos_table, fairness_table, restored_table


def exactness_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    text = f"{settings['model']} and a drawn Llama, {settings['adapters']} drawn adapters each."
    columns = ("cases", "tokens", "mismatches", "ties")
    cells = [(row["part"], *(str(row[name]) for name in columns)) for row in document["rows"]]
    rest = (
        f"{figures['cold']} cases found their adapter on its way. Their chunks: {figures['chunks_wait']} waited, "
        f"{figures['chunks_pipeline']} were pipelined, {figures['chunks_assist']} assisted; {figures['layers_cpu']} "
        f"layers were computed by CPU workers, {figures['layers_device']} on the device before the adapter was whole. "
        f"{figures['workers_killed']} times a worker was killed and {figures['workers_stopped']} times stopped; "
        f"{figures['replays']} chunks and steps were computed again. {figures['rows_joined']} rows decoded before "
        f"their adapter was there. {figures['cached_tokens']} tokens of prompts were not computed, as an earlier "
        "request had left them."
    )
    head = ("part", "cases", "tokens compared", "mismatches", "excused ties")
    return "\n".join([caption(document, text), "", *table(head, cells), "", wrapped(rest)])


ROUNDED = {"PEFT": "PEFT in {}", "alone": "engine in {}, one by one", "company": "engine in {}, 16 at a time"}


def rounding_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    text = (
        f"{settings['model']}, {settings['adapters']} adapters of ranks {settings['ranks']}, {settings['answers']} "
        f"answers of {settings['tokens']} tokens to prompts of {settings['prompt_tokens']} tokens."
    )
    lines = [
        (
            ROUNDED[row["of"]].format(settings["dtype"]), f"{row['tokens']:,}", f"{row['median']:.3f}",
            f"{row['p99']:.2f}", f"{row['most']:.2f}", f"{row['flips'] / row['tokens']:.1%}", f"{row['flip_gap']:.2f}",
        )
        for row in document["rows"]
    ]  # fmt: skip
    head = ("", "tokens", "error, median", "p99", "worst", "another likeliest", "widest gap of these")
    rest = (
        f"{figures['texts_apart']:.0f} texts differ between the engine's two ways, all from a token on whose two best "
        f"log probabilities lie at most {figures['apart_gap']:.3g} apart."
    )
    return "\n".join([caption(document, text), "", *table(head, lines), "", wrapped(rest)])


def handoff_table(document: dict[str, Any]) -> str:
    settings, figures = document["settings"], document["figures"]
    text = (
        f"Rank {settings['rank']} on q, k, v, {settings['dtype']}, {settings['calls']} round trips a row, "
        "p50 (p99) in us; engine and workers on cores of their own."
    )
    measured = [row for row in document["rows"] if not row.get("predicted")]
    before, after = figures["probe_before_ms"], figures["probe_after_ms"]
    probe = f"Contention probe (a fixed computation on one core): {before:.2f} ms before, {after:.2f} ms after."
    parts = [caption(document, text), ""]
    for names in (
        {"roundtrip": "empty round trip", "pingpong": "plain ping-pong", "socket": "over a socket"},
        {"pinned": "pinned workers", "threads": "torch threads"},
    ):
        kinds = [kind for kind in names if f"{kind}_p50_us" in measured[0]]  # a report may be older than a column
        cells = [
            (_handoff_case(row), *(f"{row[f'{kind}_p50_us']:.1f} ({row[f'{kind}_p99_us']:.1f})" for kind in kinds))
            for row in measured
        ]
        parts += [*table(("width, tokens, workers", *(names[kind] for kind in kinds)), cells), ""]
    return "\n".join([*parts, *_predicted(document), probe])


def _handoff_case(row: dict[str, Any]) -> str:
    return f"{row['width']}, {row['tokens']}, {row['workers']}"


def _predicted(document: dict[str, Any]) -> list[str]:
    """What the model of the handoff says of numbers of workers that the host has no cores for; nothing without one."""
    if "fitted" not in document["settings"]:
        return []
    model, error = document["settings"]["fitted"], document["figures"]["model_worst_error"]
    text = (
        f"**Predicted, not measured**, in us: an empty round trip takes {model['fixed']:.1f} + "
        f"{model['per_worker']:.1f} a worker + {model['per_byte'] * 1e3:.2f} a kB of x, and a slice what one worker's "
        f"takes; of the measured rows the model misses the worst by {error * 100:.0f} %."
    )
    cells = [
        (_handoff_case(row), f"{row['roundtrip_us']:.1f}", f"{row['pinned_us']:.1f}")
        for row in document["rows"]
        if row.get("predicted") and row["tokens"] in (64, 512)
    ]
    return [wrapped(text), "", *table(("width, tokens, workers", "empty round trip", "pinned workers"), cells), ""]


def worker_products_table(document: dict[str, Any]) -> str:
    """What a worker's long slices take in torch's two products, at one level."""
    cells = [
        (
            f"{row['width']}, {row['tokens']}",
            *(f"{row[f'{name}_p50_us']:.0f}" for name in ("bf16", "fp32")),
            f"{row['bf16_p50_us'] / row['fp32_p50_us']:.2f}",
        )
        for row in document["rows"]
        if row["workers"] == 1 and not row.get("predicted")
    ]
    head = ("width, tokens", "bf16", "fp32", "bf16 over fp32")
    return "\n".join([caption(document, "One thread, rank 64 on q, k, v, p50 in us."), "", *table(head, cells)])


def one(study: str, of: Callable[[dict[str, Any]], str]) -> Callable[[Reports], str]:
    """The block of one report."""
    return each((study,), of)


def each(studies: tuple[str, ...], of: Callable[[dict[str, Any]], str]) -> Callable[[Reports], str]:
    """A block for each of the reports that are there."""

    def blocks(reports: Reports) -> str:
        return "\n\n".join(of(reports[study]) for study in studies if study in reports) or "Not measured yet."

    return blocks


TABLES: dict[Path, dict[str, Callable[[Reports], str]]] = {
    ROOT / "README.md": {
        "figures: status": front_page.status,
        "figures: benefits": front_page.benefits,
        "figures": front_page.figures,
    },
    ROOT / "docs" / "results" / "benchmarks.md": {
        "engine": each(ENGINE, engine_table),
        "exactness": one("exactness", exactness_table),
        "rounding": one("rounding", rounding_table),
        "prefix-cache": one("prefix_cache", prefix_cache_table),
        "serve": each(SERVE, serve_table),
        "neighbours": each(("neighbours",), neighbours_table),
        "memory": one("memory", memory_table),
        "memory-settings": one("memory", memory_settings_table),
        "eviction-traces": one("eviction", eviction_traces_table),
        "many": each(("many_20", "many", "many_80"), many_table),
        "many-1000": each(front_page.MANY, many_table),
        "many-foreign": one("many_1000_foreign", foreign_table),
        "batches": one("batches", batches_table),
        "gateway": one("gateway", gateway_table),
        "random-keys": one("random_keys", random_keys_table),
        "control-plane": one("control_plane", control_plane_table),
        "scale": one("scale", scale_table),
        "fairness": one("fairness", fairness_table),
        "chaos": each(("chaos_minute", "chaos"), chaos_table),
        "restored": one("restored", restored_table),
    },
    ROOT / "docs" / "results" / "gpu.md": {
        "gpu-aims": one("gpu_suite", gpu_aims_table),
        "gpu-exact": one("gpu_suite", gpu_exact_table),
        "gpu-merged": one("gpu_suite", gpu_merged_table),
        "gpu-decode": one("gpu_suite", gpu_decode_table),
        "gpu-prefill": one("gpu_suite", gpu_prefill_table),
        "gpu-lora": one("gpu_suite", gpu_lora_table),
        "gpu-ttft": one("gpu_ttft", gpu_ttft_table),
        "gpu-points": one("gpu_suite", gpu_points_table),
        "gpu-regret": each(("gpu_suite", "gpu_suite_cold"), gpu_regret_text),
        "plan-replay": one("plan_replay", plan_replay_table),
        "gpu-loads": one("gpu_suite_cold", gpu_loads_table),
        "gpu-exact-cold": one("gpu_suite_cold", gpu_exact_table),
        "gpu-exact-lightllm": one("gpu_lightllm", gpu_exact_table),
        "gpu-kernels": one("gpu_suite", gpu_kernels_table),
        "gpu-service": one("gpu_service", gpu_service_table),
    },
    ROOT / "docs" / "design" / "adapter-memory.md": {
        "eviction": one("eviction", eviction_table),
        "prefetch": each(("prefetch",), prefetch_table),
    },
    ROOT / "docs" / "design" / "kernels.md": {
        "floors": one("kernels", floor_table),
        "steps": one("kernel_steps", steps_table),
        "resources": one("kernel_steps", resource_table),
        "cpu": one("kernels", cpu_table),
    },
    ROOT / "docs" / "design" / "scheduling.md": {
        "placement": one("placement", placement_table),
    },
    ROOT / "docs" / "results" / "routing-ablation.md": {
        "confirmed": one("routing_ablation", confirmed_table),
        "screen": one("routing_screen", screen_table),
        "by-length": one("routing_ablation", length_table),
    },
    ROOT / "docs" / "results" / "forecast.md": {
        "functions": one("forecast", function_table),
        "popularity": one("forecast", popularity_table),
        "days": one("forecast", day_table),
        "times": one("forecast", time_table),
        "windows": one("forecast", window_table),
        "drift": one("forecast", drift_table),
        "cost": one("forecast", cost_table),
    },
    ROOT / "docs" / "design" / "cold-start.md": {
        "link-border": one("link_bytes", border_table),
        "link-gain": one("link_bytes", link_table),
        "link-bound": one("link_bytes", bound_table),
        "coldstart-default": default_table,
        "remote-store": one("remote_store", remote_store_table),
        "handoff": one("handoff", handoff_table),
        "worker-products": each(("handoff", "handoff_avx2"), worker_products_table),
    },
    ROOT / "docs" / "guide" / "simulate.md": {
        "fidelity": one("fidelity", fidelity_table),
        "scheduling": one("scheduling", scheduling_table),
        "scheduling-measured": one("scheduling_measured", scheduling_table),
        "testbed": one("testbed", scheduling_table),
    },
    ROOT / "docs" / "operate" / "autoscale.md": {"autoscale": one("autoscale", autoscale_text)},
    ROOT / "docs" / "operate" / "performance-model.md": {"perfmodel": one("perfmodel", perfmodel_table)},
}
"""Page -> marker -> what makes the lines between its markers"""


def committed() -> Reports:
    """Every report in benchmarks/results/."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def render(page: Path, text: str, reports: Reports) -> str:
    """The page's text with its tables made anew. Raises ValueError."""
    for marker, lines in TABLES[page].items():
        block = f"<!-- {marker} -->\n{lines(reports)}\n<!-- /{marker} -->"
        verbatim = block.replace("\\", r"\\")
        text, found = re.subn(f"<!-- {marker} -->.*?<!-- /{marker} -->", verbatim, text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{page} must have one pair of markers for {marker}")
    return text


def main() -> None:
    reports = committed()
    for page in TABLES:
        page.write_text(render(page, page.read_text(), reports))


if __name__ == "__main__":
    main()
