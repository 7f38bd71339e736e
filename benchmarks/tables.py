"""Writes the tables of docs/benchmarks.md from the reports in benchmarks/results/, between their markers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks.report import ROOT
from benchmarks.step_profile import KINDS

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"


def load(study: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{study}.json").read_text())
    return document


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
        f"{_origin(document)}",
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
        f"{settings['model']}, fp32, {settings['adapters']} drawn adapters. {_origin(document)}",
        "",
        "| cases | tokens compared | mismatches | excused ties |",
        "|---|---|---|---|",
        f"| {figures['cases']} | {figures['tokens']} | {figures['mismatches']} | {figures['ties']} |",
    ])  # fmt: skip


def memory_table(document: dict[str, Any]) -> str:
    settings = document["settings"]
    names = {"pages": "pages (Garnish)", "slots": "fixed slots", "bestfit": "best fit", "slora": "unified rows"}
    lines = [
        f"{settings['calls']} calls of {settings['functions']} functions at most, "
        f"ranks {settings['ranks']} in equal parts, "
        f"{settings['running']} requests at once. {_origin(document)}",
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


def handoff_table(document: dict[str, Any]) -> str:
    settings = document["settings"]
    lines = [
        f"Rank {settings['rank']} on q, k, v, {settings['dtype']}, {settings['calls']} round trips a row, "
        f"p50 (p99) in us; engine and workers on cores of their own. {_origin(document)}",
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


def _origin(document: dict[str, Any]) -> str:
    machine, versions = document["machine"], document["versions"]
    return (
        f"Commit {document['commit']}, {machine['cores']} cores of {machine['cpu']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, PEFT {versions['peft']}, seed {document['seed']}."
    )


Table = Callable[[dict[str, Any]], str]
BENCHMARKS: dict[str, Table] = {"engine": engine_table, "exactness": exactness_table, "memory": memory_table}
COLD_START: dict[str, Table] = {"handoff": handoff_table}


def render(page: str, tables: dict[str, Table] = BENCHMARKS) -> str:
    for study, table in tables.items():
        block = f"<!-- {study} -->\n{table(load(study))}\n<!-- /{study} -->"
        page, found = re.subn(f"<!-- {study} -->.*?<!-- /{study} -->", lambda _, b=block: b, page, flags=re.DOTALL)
        if found != 1:
            raise ValueError(f"the page must have one pair of markers for {study}")
    return page


def main() -> None:
    PAGE.write_text(render(PAGE.read_text()))
    cold_start = PAGE.with_name("cold-start.md")
    cold_start.write_text(render(cold_start.read_text(), COLD_START))


if __name__ == "__main__":
    main()
