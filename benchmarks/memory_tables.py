"""Tables of who fills a pool of adapter memory best."""

from __future__ import annotations

from typing import Any

from benchmarks.report import caption
from benchmarks.rule import spread, table

NAMES = {
    "pages": "pages (Garnish)", "slots": "fixed slots", "bestfit": "best fit",
    "slora": "unified rows (our code)",
}  # fmt: skip
BETTER_LOW = {"utilisation": False, "fragmentation": True, "adapters_per_gib": False, "hit_rate": False}


def memory_table(document: dict[str, Any]) -> str:
    """Median and worst of each allocator over all settings."""
    settings, rows = document["settings"], document["rows"]
    text = (
        f"{settings['calls']} calls of {settings['functions']} functions at most, ranks {settings['ranks']} in equal "
        f"parts, {settings['running']} requests at once; median of {len(_settings(rows))} settings (worst)."
    )
    cells = []
    for allocator, name in NAMES.items():
        found = [row for row in rows if row["allocator"] == allocator]
        of = [spread((row[key] for row in found), lower_is_better=low) for key, low in BETTER_LOW.items()]
        cells.append((name, *(f"{each.median:.3f} ({each.worst:.3f})" for each in of)))
    head = ("memory", "utilisation", "fragmentation", "adapters per GiB", "hits")
    return "\n".join([caption(document, text), "", *table(head, cells)])


def memory_settings_table(document: dict[str, Any]) -> str:
    """Every setting: utilisation and hits of each allocator."""
    by_setting = _settings(document["rows"])
    cells = (
        (title, *(f"{of[name]['utilisation']:.3f}, {of[name]['hit_rate']:.3f}" for name in NAMES))
        for title, of in by_setting.items()
    )
    return "\n".join(table(("setting", *(name.split(" (")[0] for name in NAMES.values())), cells))


def _settings(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Setting -> allocator -> its row."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        title = f"{row['base']}, {row['targets']}, {row['pool_gib']} GiB, {row['without_top']}: {row['demand']:.1f}"
        found.setdefault(title, {})[row["allocator"]] = row
    return found
