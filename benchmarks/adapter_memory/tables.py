"""Tables of how adapters share memory: allocators, eviction policies, prefetch."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import captioned_table
from benchmarks.common.rule import spread, table, wrapped

ALLOCATOR_NAMES = {
    "pages": "pages (Garnish)", "slots": "fixed slots", "bestfit": "best fit",
    "slora": "unified rows (our code)",
}  # fmt: skip


BETTER_LOW = {"utilisation": False, "fragmentation": True, "adapters_per_gib": False, "hit_rate": False}
POLICY_NAMES = {
    "cost": "`cost`", "lru": "`lru`", "lfu": "`lfu`", "gdsf": "`gdsf`", "cost_oracle": "`cost`, an oracle's forecasts",
    "cost_wrong": "`cost`, wrong forecasts", "belady": "Belady with sizes",
}  # fmt: skip
FORECAST_NAMES = {"auto": "`auto`", "oracle": "an oracle's forecasts", "worthless": "worthless forecasts"}


def memory_table(document: dict[str, Any]) -> str:
    """Median and worst of each allocator over all settings."""
    settings, rows = document["settings"], document["rows"]
    text = (
        f"{settings['calls']} calls of {settings['functions']} functions at most, ranks {settings['ranks']} in equal "
        f"parts, {settings['running']} requests at once; median of {len(_settings(rows))} settings (worst)."
    )
    cells = []
    for allocator, name in ALLOCATOR_NAMES.items():
        of_allocator = [row for row in rows if row["allocator"] == allocator]
        of = [spread((row[key] for row in of_allocator), lower_is_better=low) for key, low in BETTER_LOW.items()]
        cells.append((name, *(f"{each.median:.3f} ({each.worst:.3f})" for each in of)))
    head = ("memory", "utilisation", "fragmentation", "adapters per GiB", "hits")
    return captioned_table(document, text, head, cells)


def memory_settings_table(document: dict[str, Any]) -> str:
    """Every setting: utilisation and hits of each allocator."""
    by_setting = _settings(document["rows"])
    cells = (
        (title, *(f"{of[name]['utilisation']:.3f}, {of[name]['hit_rate']:.3f}" for name in ALLOCATOR_NAMES))
        for title, of in by_setting.items()
    )
    return "\n".join(table(("setting", *(name.split(" (")[0] for name in ALLOCATOR_NAMES.values())), cells))


def _settings(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Setting -> allocator -> its row."""
    by_setting: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        title = f"{row['base']}, {row['targets']}, {row['pool_gib']} GiB, {row['without_top']}: {row['demand']:.1f}"
        by_setting.setdefault(title, {})[row["allocator"]] = row
    return by_setting


def eviction_table(document: dict[str, Any]) -> str:
    """Every policy over all held-out traces and pools, and what the figures mean."""
    figures, settings = document["figures"], document["settings"]
    reported = [row for row in document["rows"] if row["held_out"]]
    calls = sum({row["trace"]: row["calls"] for row in reported}.values())
    text = (
        "Simulated on InVitro's 500-function, 8-hour sample of the Azure 2019 trace and on ServeGen's clients: "
        f"{calls:,} calls in {len({row['trace'] for row in reported})} traces that nothing was tuned on; adapters of "
        f"a 7B Llama on {settings['projections']}, ranks {settings['ranks']}; pools of {_pools(settings)} of their "
        "bytes. Median over traces and pools (worst)."
    )
    cells = []
    for name, title in POLICY_NAMES.items():
        over = spread((row[f"miss_{name}"] / row["miss_lru"] for row in reported), lower_is_better=True)
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
    return captioned_table(document, text, head, cells, below)


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


def prefetch_table(document: dict[str, Any]) -> str:
    """Each kind of forecast against no prefetch, over all rows-out traces, and what the figures mean."""
    rows = document["rows"]
    calls = sum(row["calls"] for row in rows)
    text = (
        f"Simulated: {calls:,} calls in {len(rows)} traces that nothing was tuned on, the adapters, two tiers and "
        "rates of the eviction study. In times of what no prefetch gives; median over traces (worst)."
    )
    cells = [
        (
            title,
            *(_over(rows, figure, name) for figure in ("wait_ms", "absent_share", "misses")),
            f"{100 * document['figures'][f'wasted_{name}']:.0f} %",
        )
        for name, title in FORECAST_NAMES.items()
    ]
    head = ("forecasts", "waits for adapters", "calls from the store", "calls not on the device", "bytes wasted")
    absent = sum(row["absent_share_off"] * row["calls"] for row in rows) / calls
    missed = sum((1 - row["device_share_off"]) * row["calls"] for row in rows) / calls
    below = wrapped(
        f"Without prefetch {100 * absent:.1f} % of the calls find their adapter in the store alone, and "
        f"{100 * missed:.0f} % not on the device."
    )
    return captioned_table(document, text, head, cells, below)


def _over(rows: list[dict[str, Any]], figure: str, name: str) -> str:
    def of(row: dict[str, Any], variant: str) -> float:
        return float(1 - row[f"device_share_{variant}"] if figure == "misses" else row[f"{figure}_{variant}"])

    over = spread((of(row, name) / of(row, "off") for row in rows), lower_is_better=True)
    return f"{over.median:.2f} ({over.worst:.2f})"
