"""The tables of handoffs, for docs/design/cold-start.md."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import ON_ONE_CORE, caption, captioned_table, probe_text
from benchmarks.common.rule import table, wrapped


def handoff_table(document: dict[str, Any]) -> str:
    settings, figures = document["settings"], document["figures"]
    text = (
        f"Rank {settings['rank']} on q, k, v, {settings['dtype']}, {settings['calls']} round trips a row, "
        "p50 (p99) in us; engine and workers on cores of their own."
    )
    measured = [row for row in document["rows"] if not row.get("predicted")]
    probe = probe_text(figures, ON_ONE_CORE)
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
    """Renders predictions for numbers of workers that the host has no cores for; [] for a report without a model."""
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
    """Renders the times of a worker's long slices in torch's two products, at one level."""
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
    return captioned_table(document, "One thread, rank 64 on q, k, v, p50 in us.", head, cells)
