"""The tables of docs/design/kernels.md, from the reports of benchmarks.kernels.kernels and benchmarks.kernels.steps."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import caption, probe_text

WIDTH = 4096
"""The width whose shapes the page shows; the report has the others."""


def floor_table(document: dict[str, Any]) -> str:
    lines = [
        caption(document, "bf16."),
        "",
        "| requests x tokens, ranks, widths | adapter bytes | all bytes | launches | programs: shrink, expand |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        if f" {WIDTH}->" in row.get("shape", ""):
            lines.append(
                f"| {row['shape']} | {_mib(row['weight_bytes'])} | {_mib(row['bytes'])} | {row['launches']} "
                f"| {row['shrink_programs']}, {row['expand_programs']} |"
            )
    return "\n".join(lines)


def steps_table(document: dict[str, Any]) -> str:
    lines = [
        caption(document, f"bf16, contexts of {document['settings']['context']} tokens."),
        "",
        "| model, rows | adapted | launches of a layer, of a step | bytes of a step | weights, contexts, adapters |",
        "|---|---|---|---|---|",
    ]
    for row in (row["step"] for row in document["rows"] if "step" in row):
        lines.append(
            f"| {row['model']}, {row['rows']} | {row['adapted']} | {row['layer_launches']}, {row['launches']} "
            f"| {row['bytes'] / 1e9:.2f} GB | {row['floor_bytes'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def resource_table(document: dict[str, Any]) -> str:
    compiled = [row["resources"] for row in document["rows"] if "resources" in row]
    targets = sorted({(row["sm"], row["dtype"]) for row in compiled})
    lines = [
        caption(document, f"Triton {document['versions']['triton']}."),
        "",
        "| kernel | " + " | ".join(f"sm_{sm} {dtype}" for sm, dtype in targets) + " |",
        "|---" * (len(targets) + 1) + "|",
    ]
    for kernel in dict.fromkeys(row["kernel"] for row in compiled):
        cells = {
            (row["sm"], row["dtype"]): f"{row['registers']}, {row['spills']} B, {row['shared_bytes'] / 1024:.0f} KiB"
            for row in compiled
            if row["kernel"] == kernel
        }
        lines.append(f"| `{kernel}` | " + " | ".join(cells[target] for target in targets) + " |")
    return "\n".join(lines)


def cpu_table(document: dict[str, Any]) -> str:
    figures, threads = document["figures"], document["settings"]["threads"]
    lines = [
        caption(document, f"{threads} threads."),
        "",
        probe_text(figures),
        "",
        "| layers, weights | ranks | adapter bytes | compiled | torch | read | compiled / read | torch / compiled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in (row["cpu"] for row in document["rows"] if "cpu" in row):
        lines.append(
            f"| {row['model']}, {row['dtype']} | {row['ranks']} | {_mib(row['weight_bytes'])} "
            f"| {row['compiled_ms']:.1f} ms | {row['torch_ms']:.1f} ms | {row['read_ms']:.1f} ms "
            f"| {row['compiled_ms'] / row['read_ms']:.1f} | {row['torch_ms'] / row['compiled_ms']:.1f} |"
        )
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.2f} MiB"
