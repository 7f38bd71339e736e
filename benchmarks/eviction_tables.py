"""Tables of which eviction policy keeps the right adapters."""

from __future__ import annotations

from typing import Any

from benchmarks.report import caption
from benchmarks.rule import spread, table, wrapped

NAMES = {
    "cost": "`cost`", "lru": "`lru`", "lfu": "`lfu`", "gdsf": "`gdsf`", "cost_oracle": "`cost`, an oracle's forecasts",
    "cost_wrong": "`cost`, wrong forecasts", "belady": "Belady with sizes",
}  # fmt: skip


def eviction_table(document: dict[str, Any]) -> str:
    """Every policy over all held-out traces and pools, and what the figures mean."""
    figures, settings = document["figures"], document["settings"]
    held = [row for row in document["rows"] if row["held_out"]]
    calls = sum({row["trace"]: row["calls"] for row in held}.values())
    text = (
        "Simulated on InVitro's 500-function, 8-hour sample of the Azure 2019 trace and on ServeGen's clients: "
        f"{calls:,} calls in {len({row['trace'] for row in held})} traces that nothing was tuned on; adapters of a 7B "
        f"Llama on {settings['projections']}, ranks {settings['ranks']}; pools of {_pools(settings)} of their bytes. "
        "Median over traces and pools (worst)."
    )
    cells = []
    for name, title in NAMES.items():
        over = spread((row[f"miss_{name}"] / row["miss_lru"] for row in held), lower_is_better=True)
        closed = figures.get(f"gap_closed_{name}", 1.0)
        reload = figures.get(f"reload_over_lru_{name}")
        worst = figures.get(f"reload_worst_over_lru_{name}")
        cells.append((
            title,
            f"{over.median:.2f} ({over.worst:.2f})",
            f"{closed:.2f}",
            "" if reload is None else f"{reload:.2f} ({worst:.2f})",
        ))  # fmt: skip
    head = ("policy", "missed bytes over LRU's", "gap to Belady closed", "reload time over LRU's")
    below = wrapped(
        f"LRU misses {100 * figures['miss_share_lru']:.1f} % of the called bytes, `cost` "
        f"{100 * figures['miss_share_cost']:.1f} %, Belady with sizes {100 * figures['miss_share_belady']:.1f} %; no "
        f"policy can miss less than {100 * figures['miss_share_bound']:.1f} % (PFOO-L), and of the gap to that `cost` "
        f"closes {figures['bound_gap_closed_cost']:.2f}. An order of {settings['residents']:,} adapters takes "
        f"{figures['order_ms']:.1f} ms."
    )
    return "\n".join([caption(document, text), "", *table(head, cells), "", below])


def eviction_traces_table(document: dict[str, Any]) -> str:
    """Every trace and pool: per cent of the called bytes that each policy misses."""
    names = ("lru", "cost", "lfu", "gdsf", "belady", "bound")
    cells = (
        (
            f"{row['trace']}, {row['adapters']} adapters, {row['pool_share']:.2f}"
            + ("" if row["held_out"] else ", tuned"),
            *(f"{100 * row[f'miss_{name}']:.1f}" for name in names),
        )
        for row in document["rows"]
    )
    return "\n".join(table(("trace, adapters, pool", *(*names[:-1], "PFOO-L")), cells))


def _pools(settings: dict[str, Any]) -> str:
    return " and ".join(f"{100 * share:.0f} %" for share in settings["pools"])
