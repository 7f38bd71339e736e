"""The table of what predicted prefetch brings."""

from __future__ import annotations

from typing import Any

from benchmarks.report import caption
from benchmarks.rule import spread, table, wrapped

NAMES = {"auto": "`auto`", "oracle": "an oracle's forecasts", "worthless": "worthless forecasts"}


def prefetch_table(document: dict[str, Any]) -> str:
    """Each kind of forecast against no prefetch, over all rows-out traces, and what the figures mean."""
    rows = document["rows"]
    calls = sum(row["calls"] for row in rows)
    text = (
        f"Simulated: {calls:,} calls in {len(rows)} traces that nothing was tuned on, the adapters, two tiers and "
        "rates of the eviction study. In times of what no prefetch gives; median over traces (worst)."
    )
    cells = [(title, *(_over(rows, figure, name) for figure in ("wait_ms", "absent_share", "misses")),
              f"{100 * document['figures'][f'wasted_{name}']:.0f} %") for name, title in NAMES.items()]  # fmt: skip
    head = ("forecasts", "waits for adapters", "calls from the store", "calls not on the device", "bytes wasted")
    absent = sum(row["absent_share_off"] * row["calls"] for row in rows) / calls
    missed = sum((1 - row["device_share_off"]) * row["calls"] for row in rows) / calls
    below = wrapped(
        f"Without prefetch {100 * absent:.1f} % of the calls find their adapter in the store alone, and "
        f"{100 * missed:.0f} % not on the device."
    )
    return "\n".join([caption(document, text), "", *table(head, cells), "", below])


def _over(rows: list[dict[str, Any]], figure: str, name: str) -> str:
    def of(row: dict[str, Any], variant: str) -> float:
        return float(1 - row[f"device_share_{variant}"] if figure == "misses" else row[f"{figure}_{variant}"])

    over = spread((of(row, name) / of(row, "off") for row in rows), lower_is_better=True)
    return f"{over.median:.2f} ({over.worst:.2f})"
