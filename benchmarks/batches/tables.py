"""The table of what grouping a batch's calls by adapter brings."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import captioned_table
from benchmarks.common.rule import spread

ORDERS = (("grouped by adapter", True), ("in the file's order", False))


def batches_table(document: dict[str, Any]) -> str:
    """Both orders of one file, median of the rounds and the worst."""
    settings, figures, rows = document["settings"], document["figures"], document["rows"]
    text = (
        f"{settings['model']}, {settings['adapters']} adapters of rank {settings['rank']} on q, k, v, "
        f"{settings['pool']} of them fit on the device, a simulated link of {settings['link_mb_per_s']:.0f} MB/s; "
        f"{settings['calls']:,} calls of 60 tokens in and 20 out, shuffled. Median of {settings['rounds']} "
        f"round{'s' if settings['rounds'] > 1 else ''} (worst)."
    )
    cells = [
        (
            title,
            _cell(rows, "tokens_per_second", grouped=grouped, lower=False),
            _cell(rows, "loads", grouped=grouped),
        )
        for title, grouped in ORDERS
    ]
    rest = (
        f"Grouped over the file's order: {figures['over_file_order']:.2f} times the tokens per second (aim 1.5); "
        f"{figures['loads_over_adapters']:.2f} loads an adapter (aim 1.1). The 95th percentile of interactive first "
        f"tokens beside a grouped batch is {figures['interactive_ttft_p95_ms']:.0f} ms, "
        f"{figures['interactive_ttft_p95_ratio']:.2f} times that without one (aim 1.25, or a batch's step); of "
        f"{len(settings['beside_s'])} calls, the worst took {1e3 * max(settings['beside_s']):.0f} ms (alone, of "
        f"{len(settings['alone_s'])}, {1e3 * max(settings['alone_s']):.0f} ms)."
    )
    head = ("calls are run", "tokens/s", "loads")
    return captioned_table(document, text, head, cells, rest)


def _cell(rows: list[dict[str, Any]], name: str, *, grouped: bool, lower: bool = True) -> str:
    rounds = spread((row[name] for row in rows if row["grouped"] is grouped), lower_is_better=lower)
    return f"{rounds.median:.0f} ({rounds.worst:.0f})"
