"""Tables of what a service loses when parts of it die."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common.report import caption, captioned_table
from benchmarks.common.rule import table, wrapped

Row = dict[str, Any]


def chaos_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    harm = ", ".join(f"{name} {count}" for name, count in sorted(document["rows"][0]["kills"].items()))
    interval_s = settings.get("every")
    form = (
        f"one part killed every {interval_s:.0f} s"
        if interval_s
        else f"one part harmed every {settings['pause']:.0f} s"
    )
    callers = f"{settings['rate']:.0f} calls/s" if interval_s else f"{settings['callers']} callers"
    text = (
        f"{form.capitalize()}, {settings['model']}, {settings['seconds'] / 60:.0f} minutes, {callers}, "
        f"{figures['deploys']:.0f} deploys, {figures['kills']:.0f} parts harmed."
    )
    counted = ("wrong_tokens", "unanswered", "lost_acknowledged", "leaked", "jobs_wrong", "policies_wrong")
    zero = [name for name in counted if name in figures]
    refused = f"{figures['refused']:.0f} ({refused_share(figures)})"
    calls = (f"{figures['requests']:.0f}", f"{figures['done']:.0f}", refused, f"{figures['cut']:.0f}")
    return "\n".join([
        caption(document, text),
        "",
        *table(("requests", "done", "refused", "of them cut" if interval_s else "cut, called again"), [calls]),
        "",
        *table([name.replace("_", " ") for name in zero], [[f"{figures[name]:.0f}" for name in zero]]),
        "",
        wrapped(f"What was harmed: {harm}.{_not_done(document['rows'][0]) if interval_s else ''}"),
    ])  # fmt: skip


def gone_table(document: dict[str, Any]) -> str:
    """Renders gone.py's replies by the resource that was away, and its counts that have to be 0."""
    figures, settings, row = document["figures"], document["settings"], document["rows"][0]
    text = (
        f"{settings['model']}, {settings['seconds'] / 60:.0f} minutes, {settings['callers']} callers of "
        f"{settings['routes']} routes, "
        f"{figures['calls']:.0f} calls, {figures['acknowledged']:.0f} acknowledged changes."
    )
    cells = []
    for name, replies in sorted(row["by_resource"].items()):
        statuses = {int(status): count for status, count in replies["statuses"].items()}
        classes = (sum(n for status, n in statuses.items() if status // 100 == kind) for kind in (2, 4))
        failed = ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items()) if status >= 500)
        cells.append((name, *map(str, classes), failed or "-", f"{replies['longest_s']:.1f} s"))
    zero = ("unanswered", "cut", "wrong", "unrecovered", "lost")
    return "\n".join([
        caption(document, text),
        "",
        *table(("away", "2xx", "4xx", "5xx", "longest call"), cells),
        "",
        *table(zero, [[f"{figures[name]:.0f}" for name in zero]]),
    ])  # fmt: skip


def restored_table(document: dict[str, Any]) -> str:
    settings, rows = document["settings"], [row for row in document["rows"] if "copies" in row]
    replaced = [row for row in document["rows"] if "leader_s" in row]
    text = (
        f"Simulated store of {settings['store'] / 1e6:g} MB/s. {settings['nodes']} nodes, {settings['model']}, rank "
        f"{settings['rank']}, median of {settings['rounds']} kills (worst). A killed leader of "
        f"{settings['gateway_workers']} gateway workers was replaced after {_worst_s(replaced, 'leader_s')}."
    )
    cells = []
    for copies in sorted({row["copies"] for row in rows}):
        of_count = [row for row in rows if row["copies"] == copies]
        lost = [row["lost"] for row in of_count]
        cells.append((
            str(copies),
            f"{min(lost)} to {max(lost)}" if min(lost) < max(lost) else str(lost[0]),
            _worst_s(of_count, "first_s"),
            _worst_s(of_count, "all_s"),
        ))  # fmt: skip
    header = ("copies", "lost at a time", "first one back", "all back")
    return captioned_table(document, text, header, cells)


def _worst_s(rows: list[Row], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{median(values):.1f} s ({max(values):.1f})"


def _not_done(row: dict[str, Any]) -> str:
    parts = [
        f"{sum(reasons.values())} after {harm} "
        f"({', '.join(f'{count} {why}' for why, count in sorted(reasons.items()))})"
        for harm, reasons in sorted(row["not_done_after"].items())
    ]
    return f" Refused: {'; '.join(parts)}." if parts else ""


def refused_share(figures: dict[str, float]) -> str:
    """The share of requests that were not done."""
    share = figures["refused"] / figures["requests"]
    return f"{share:.0%}" if share >= 0.1 else f"{share:.2%}"
