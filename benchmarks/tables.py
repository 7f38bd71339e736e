"""Writes the tables of docs/ from the reports in benchmarks/results/, between their markers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.autoscale_report import autoscale_text
from benchmarks.cold_tables import coldstart_table, planning_table, streaming_table
from benchmarks.gateway_tables import gateway_table, placement_table, scale_table
from benchmarks.kernel_tables import cpu_table, floor_table, resource_table
from benchmarks.perfmodel_report import perfmodel_table
from benchmarks.report import RESULTS, ROOT, load, origin
from benchmarks.scheduling_tables import fidelity_table, scheduling_table
from benchmarks.service_tables import chaos_table, fairness_table
from benchmarks.step_profile import KINDS


def engine_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    rows = [
        ("base, 1 request", "base", 1),
        ("base, 8 requests", "base", 8),
        ("one adapter of rank 64, 1 request", "mixed", 1),
        ("eight adapters of ranks 8-128, 8 requests", "mixed", 8),
    ]
    lines = [
        f"{settings['model']}, {settings['dtype']}, {settings['threads']} threads for each, "
        f"{settings['prompt_tokens']} prompt and {settings['output_tokens']} output tokens, "
        f"median of {settings['rounds']} alternated rounds. "
        f"{origin(document)}",
        "",
        "| | engine | PEFT `generate` | ratio (lowest round) | engine TTFT | PEFT TTFT | service over HTTP |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, kind, n in rows:
        ratio, lowest = figures[f"over_peft_{kind}_{n}"], figures[f"over_peft_{kind}_{n}_min"]
        lines.append(
            f"| {title} | {figures[f'{kind}_tok_s_{n}']:.0f} tok/s | {figures[f'peft_{kind}_tok_s_{n}']:.0f} tok/s "
            f"| {ratio:.2f} ({lowest:.2f}) | {figures[f'{kind}_ttft_ms_{n}']:.0f} ms "
            f"| {figures[f'peft_{kind}_ttft_ms_{n}']:.0f} ms | {figures[f'http_{kind}_tok_s_{n}']:.0f} tok/s |"
        )
    kinds = [*KINDS, "other operators"]
    lines += [
        "",
        "A decode step of 8 requests, ms (operators' own time by torch's profiler; the step without it):",
        "",
        f"| | step | {' | '.join(kinds)} |",
        "|---" * (len(kinds) + 2) + "|",
    ]
    for title, name in (("base", "base_8"), ("eight adapters", "mixed_8")):
        values = [figures[f"{name}_{kind.replace(' ', '_')}_ms"] for kind in ["step", *kinds]]
        lines.append(f"| {title} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    before, after = figures["probe_before_ms"], figures["probe_after_ms"]
    lines += ["", f"Contention probe (a fixed computation on one core): {before:.2f} ms before, {after:.2f} ms after."]
    return "\n".join(lines)


def exactness_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    return "\n".join([
        f"{settings['model']}, fp32, {settings['adapters']} drawn adapters. {origin(document)}",
        "",
        "| cases | tokens compared | mismatches | excused ties |",
        "|---|---|---|---|",
        f"| {figures['cases']} | {figures['tokens']} | {figures['mismatches']} | {figures['ties']} |",
        "",
        f"{figures['cold']} of them found their adapter on its way. Their chunks: {figures['chunks_wait']} waited, "
        f"{figures['chunks_pipeline']} were pipelined, {figures['chunks_assist']} assisted; {figures['layers_cpu']} "
        f"layers were computed by CPU workers, {figures['layers_device']} on the device before the adapter was whole. "
        f"{figures['workers_killed']} times a worker was killed and {figures['workers_stopped']} times stopped; "
        f"{figures['replays']} chunks were computed again.",
    ])  # fmt: skip


def memory_table(document: dict[str, Any]) -> str:
    settings = document["settings"]
    names = {"pages": "pages (Garnish)", "slots": "fixed slots", "bestfit": "best fit", "slora": "unified rows"}
    lines = [
        f"{settings['calls']} calls of {settings['functions']} functions at most, "
        f"ranks {settings['ranks']} in equal parts, "
        f"{settings['running']} requests at once. {origin(document)}",
        "",
        "| base, projections, pool | left out | demand / pool | memory | utilisation | fragmentation "
        "| adapters per GiB | hits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['base']}, {row['targets']}, {row['pool_gib']} GiB "
            f"| top {row['without_top']} | {row['demand']:.1f} "
            f"| {names[row['allocator']]} | {row['utilisation']:.3f} | {row['fragmentation']:.3f} "
            f"| {row['adapters_per_gib']:.2f} | {row['hit_rate']:.3f} |"
        )
    return "\n".join(lines)


def serve_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    lines = [
        f"{settings['dtype']}, {settings['threads']} threads for each, {settings['concurrency']} requests at once, "
        f"{settings['prompt_tokens']} prompt and {settings['output_tokens']} output tokens, "
        f"median of {settings['rounds']} alternated rounds, the worst round in brackets. {origin(document)}",
        "",
        "| | base | eight adapters | over PEFT, base | over PEFT, adapters | step: base | adapters | padded "
        "| padded / mixed | added / floor |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, title in settings["models"].items():
        of = {figure.removesuffix(f"_{name}"): value for figure, value in figures.items() if figure.endswith(name)}
        steps = " | ".join(f"{of[f'{kind}_step_ms']:.1f} ms" for kind in ("base", "mixed", "padded"))
        ratios = [
            f"{of[figure]:.2f} ({of[f'{figure}_{worst}']:.2f})"
            for figure, worst in (
                ("over_peft_static_base", "min"), ("over_peft", "min"), ("padded_over_mixed_step", "min"),
                ("added_step_over_floor", "max"),
            )
        ]  # fmt: skip
        lines.append(
            f"| {title} | {of['base_tok_s']:.0f} tok/s | {of['mixed_tok_s']:.0f} tok/s | {ratios[0]} | {ratios[1]} "
            f"| {steps} | {ratios[2]} | {ratios[3]} |"
        )
    before, after = figures["probe_before_ms"], figures["probe_after_ms"]
    lines += [
        "",
        f"Over HTTP ({settings['models']['smollm2']}, the client on the same cores): "
        f"{figures['http_base_tok_s']:.0f} tok/s for the base and {figures['http_mixed_tok_s']:.0f} tok/s for eight "
        f"adapters. Open loop, {figures['open_rate']:.2f} requests/s: TTFT p50 {figures['open_ttft_p50_ms']:.0f} ms "
        f"and p99 {figures['open_ttft_p99_ms']:.0f} ms, TPOT p50 {figures['open_tpot_p50_ms']:.0f} ms, sends late by "
        f"{figures['open_late_max_ms']:.1f} ms at most. The gateway adds {figures['gateway_added_p50_ms']:.1f} ms to "
        f"the median TTFT of {settings['pairs']} short requests, each sent through it and straight to the node.",
        "",
        f"Contention probe: {before:.2f} ms before, {after:.2f} ms after.",
    ]
    return "\n".join(lines)


def handoff_table(document: dict[str, Any]) -> str:
    settings = document["settings"]
    lines = [
        f"Rank {settings['rank']} on q, k, v, {settings['dtype']}, {settings['calls']} round trips a row, "
        f"p50 (p99) in us; engine and workers on cores of their own. {origin(document)}",
        "",
        "| width, tokens | workers | empty round trip | over a socket | product on pinned workers | on torch threads |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        values = [
            f"{row[f'{kind}_p50_us']:.1f} ({row[f'{kind}_p99_us']:.1f})"
            for kind in ("roundtrip", "socket", "pinned", "threads")
        ]
        lines.append(f"| {row['width']}, {row['tokens']} | {row['workers']} | {' | '.join(values)} |")
    before, after = document["figures"]["probe_before_ms"], document["figures"]["probe_after_ms"]
    lines += ["", f"Contention probe (a fixed computation on one core): {before:.2f} ms before, {after:.2f} ms after."]
    return "\n".join(lines)


TABLES: dict[Path, dict[str, tuple[str, Callable[[dict[str, Any]], str]]]] = {
    ROOT / "docs" / "benchmarks.md": {
        "engine": ("engine", engine_table),
        "exactness": ("exactness", exactness_table),
        "serve": ("serve", serve_table),
        "memory": ("memory", memory_table),
        "gateway": ("gateway", gateway_table),
        "scale": ("scale", scale_table),
        "fairness": ("fairness", fairness_table),
        "chaos": ("chaos", chaos_table),
    },
    ROOT / "docs" / "kernels.md": {
        "floors": ("kernels", floor_table),
        "resources": ("kernels", resource_table),
        "cpu": ("kernels", cpu_table),
    },
    ROOT / "docs" / "scheduling.md": {
        "placement": ("placement", placement_table),
    },
    ROOT / "docs" / "cold-start.md": {
        "coldstart": ("coldstart", coldstart_table),
        "planning": ("coldstart", planning_table),
        "streaming": ("coldstart", streaming_table),
        "handoff": ("handoff", handoff_table),
    },
    ROOT / "docs" / "simulate.md": {
        "fidelity": ("fidelity", fidelity_table),
        "scheduling": ("scheduling", scheduling_table),
        "scheduling-measured": ("scheduling_measured", scheduling_table),
        "testbed": ("testbed", scheduling_table),
    },
    ROOT / "docs" / "autoscale.md": {"autoscale": ("autoscale", autoscale_text)},
    ROOT / "docs" / "performance-model.md": {"perfmodel": ("perfmodel", perfmodel_table)},
}
"""Page -> markers -> (study, what turns its report into a table)"""


def render(page: Path, text: str) -> str:
    """The page's text with its tables made anew. Raises ValueError."""
    for marker, (study, table) in TABLES[page].items():
        measured = (RESULTS / f"{study}.json").exists()
        block = f"<!-- {marker} -->\n{table(load(study)) if measured else 'Not measured yet.'}\n<!-- /{marker} -->"
        verbatim = block.replace("\\", r"\\")
        text, found = re.subn(f"<!-- {marker} -->.*?<!-- /{marker} -->", verbatim, text, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"{page} must have one pair of markers for {marker}")
    return text


def main() -> None:
    for page in TABLES:
        page.write_text(render(page, page.read_text()))


if __name__ == "__main__":
    main()
