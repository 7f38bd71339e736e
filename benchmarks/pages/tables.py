"""Writes the figures of README and docs from the reports in benchmarks/results/, between their markers.

The rule by which a figure is stated is in benchmarks/common/rule.py, for readers in docs/results/benchmarks.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.adapter_memory.tables import (
    eviction_table,
    eviction_traces_table,
    memory_settings_table,
    memory_table,
    prefetch_table,
)
from benchmarks.autoscale.tables import autoscale_text
from benchmarks.batches.tables import batches_table
from benchmarks.coldstart.tables import default_table, remote_store_table
from benchmarks.common.report import RESULTS, ROOT
from benchmarks.engine.tables import engine_table, neighbours_table
from benchmarks.engines.tables import speed_table, start_table
from benchmarks.exactness.tables import exactness_table, rounding_table
from benchmarks.fairness.tables import fairness_table
from benchmarks.faults.tables import chaos_table, gone_table, restored_table
from benchmarks.forecast.tables import (
    cost_table,
    day_table,
    drift_table,
    function_table,
    popularity_table,
    time_table,
    window_table,
)
from benchmarks.gateway.tables import control_plane_table, gateway_table, random_keys_table
from benchmarks.gpu.tables import (
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
from benchmarks.handoff.tables import handoff_table, worker_products_table
from benchmarks.kernels.tables import cpu_table, floor_table, resource_table, steps_table
from benchmarks.link_bytes.tables import border_table, bound_table, link_table
from benchmarks.many.foreign import foreign_table
from benchmarks.many.tables import many_table
from benchmarks.pages import front_page
from benchmarks.pages.front_page import ENGINE, SERVE, Reports
from benchmarks.perfmodel.tables import perfmodel_table
from benchmarks.prefix_cache.tables import prefix_cache_table
from benchmarks.registry.tables import scale_table
from benchmarks.scheduling.ablation_tables import confirmed_table, length_table, screen_table
from benchmarks.scheduling.tables import fidelity_table, placement_table, scheduling_table
from benchmarks.serve.tables import relay_cost_text, serve_table, versions_table
from benchmarks.structured.tables import json_schema_table


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
        "engines": each(("engines",), speed_table),
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
        "gone": one("gone", gone_table),
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
    ROOT / "docs" / "design" / "decisions" / "plain-words.md": {
        "versions": one("versions", versions_table),
        "relay-cost": one("relay_cost", relay_cost_text),
    },
    ROOT / "docs" / "guide" / "structured-output.md": {
        "json-schema": one("json_schema", json_schema_table),
    },
    ROOT / "docs" / "guide" / "simulate.md": {
        "fidelity": one("fidelity", fidelity_table),
        "scheduling": one("scheduling", scheduling_table),
        "scheduling-measured": one("scheduling_measured", scheduling_table),
        "testbed": one("testbed", scheduling_table),
    },
    ROOT / "docs" / "operate" / "engines.md": {"engines-start": each(("engines",), start_table)},
    ROOT / "docs" / "operate" / "autoscale.md": {"autoscale": one("autoscale", autoscale_text)},
    ROOT / "docs" / "operate" / "performance-model.md": {"perfmodel": one("perfmodel", perfmodel_table)},
}


def committed() -> Reports:
    """Every report in benchmarks/results/."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))}


def render(page: Path, text: str, reports: Reports) -> str:
    """Returns the page's text with its tables rendered again. Raises ValueError."""
    for marker, lines in TABLES[page].items():
        block = f"<!-- {marker} -->\n{lines(reports)}\n<!-- /{marker} -->"
        verbatim = block.replace("\\", r"\\")
        text, count = re.subn(f"<!-- {marker} -->.*?<!-- /{marker} -->", verbatim, text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{page} must have one pair of markers for {marker}")
    return text


def main() -> None:
    reports = committed()
    for page in TABLES:
        page.write_text(render(page, page.read_text(), reports))


if __name__ == "__main__":
    main()
