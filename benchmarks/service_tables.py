"""Tables of what tenants get beside others, and of what a service loses when parts of it die."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import caption
from benchmarks.rule import table, wrapped

Row = dict[str, Any]


def fairness_table(document: dict[str, Any]) -> str:
    settings, rows = document["settings"], document["rows"]
    bound = "passes bounded by its performance model" if settings["performance_model"] else "no performance model"
    text = (
        f"{settings['model']}, {settings['max_rows']} rows, {bound}, median of {settings['rounds']} alternated rounds "
        f"of {settings['round_seconds']:.0f} s, the worst round in brackets."
    )
    shares = [
        (row["tenant"], f"{row['weight']:g}", f"{row['share']:.2%}", f"{row['due']:.2%}")
        for row in rows
        if row["part"] == "shares"
    ]
    probe = f"{settings['probe_before_ms']:.2f} ms before, {settings['probe_after_ms']:.2f} ms after"
    return "\n".join([
        caption(document, text),
        "",
        *table(("tenant", "weight", "share of the service", "due"), shares),
        "",
        *_flood_lines(document),
        "",
        *_strict_lines(rows),
        "",
        f"Contention probe: {probe}.",
    ])  # fmt: skip


def _flood_lines(document: dict[str, Any]) -> list[str]:
    figures = document["figures"]
    rows = []
    for case, title in (("alone", "three tenants, without the flood"), ("flood", "beside ten times a share")):
        found = [row for row in document["rows"] if row["part"] == "flood" and row["case"] == case]
        times = (_worst_ms(found, name) for name in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms"))
        rows.append((title, *times, f"{median(row['served'] for row in found):.0f}"))
    ratios = ", ".join(
        f"{name} {_text(flood_ratio(document, key))}"
        for name, key in (("TTFT p50", "ttft_p50_ms"), ("TTFT p95", "ttft_p95_ms"), ("TPOT p50", "tpot_p50_ms"))
    )
    rest = f"Shares err by {figures['share_error']:.2%} at most. With the flood over without it, by round: {ratios}."
    return [*table(("", "TTFT p50", "TTFT p95", "TPOT p50", "served, cost/s"), rows), "", wrapped(rest)]


def flood_ratio(document: dict[str, Any], key: str) -> tuple[float, float]:
    """Of the other tenants' time with the flood to that without it: median and worst of the rounds."""
    cases: dict[str, list[float]] = {"alone": [], "flood": []}
    for row in document["rows"]:
        if row["part"] == "flood":
            cases[row["case"]].append(row[key])
    ratios = [flood / alone for flood, alone in zip(cases["flood"], cases["alone"], strict=True)]
    return median(ratios), max(ratios)


def _text(ratio: tuple[float, float]) -> str:
    return f"{ratio[0]:.2f} ({ratio[1]:.2f})"


def _strict_lines(rows: list[Row]) -> list[str]:
    calls = [row for row in rows if row["part"] == "strict"]
    cells = []
    for case in ("strict", "standard"):
        found = [row for row in calls if row["case"] == case]
        kept = f"{median(row['attain'] for row in found):.1%} ({min(row['attain'] for row in found):.1%})"
        times = (_worst_ms(found, name) for name in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms"))
        cells.append((case, kept, *times))
    slo = f"{calls[0]['ttft_ms']:.0f} ms TTFT and {calls[0]['tpot_ms']:.0f} ms TPOT"
    text = f"Calls with an SLO of {slo}, beside three times the capacity of best effort:"
    return [text, "", *table(("class", "within both", "TTFT p50", "TTFT p95", "TPOT p50"), cells)]


def _worst_ms(found: list[Row], name: str) -> str:
    values = [row[name] for row in found]
    return f"{median(values):.0f} ms ({max(values):.0f})"


def chaos_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    harm = ", ".join(f"{name} {count}" for name, count in sorted(document["rows"][0]["kills"].items()))
    every = settings.get("every")
    form = f"one part killed every {every:.0f} s" if every else f"one part harmed every {settings['pause']:.0f} s"
    callers = f"{settings['rate']:.0f} calls/s" if every else f"{settings['callers']} callers"
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
        *table(("requests", "done", "refused", "of them cut" if every else "cut, called again"), [calls]),
        "",
        *table([name.replace("_", " ") for name in zero], [[f"{figures[name]:.0f}" for name in zero]]),
        "",
        wrapped(f"What was harmed: {harm}.{_not_done(document['rows'][0]) if every else ''}"),
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
        own = [row for row in rows if row["copies"] == copies]
        lost = [row["lost"] for row in own]
        cells.append((
            str(copies),
            f"{min(lost)} to {max(lost)}" if min(lost) < max(lost) else str(lost[0]),
            _worst_s(own, "first_s"),
            _worst_s(own, "all_s"),
        ))  # fmt: skip
    header = ("copies", "lost at a time", "first one back", "all back")
    return "\n".join([caption(document, text), "", *table(header, cells)])


def _worst_s(found: list[Row], name: str) -> str:
    values = [row[name] for row in found]
    return f"{median(values):.1f} s ({max(values):.1f})"


def _not_done(row: dict[str, Any]) -> str:
    parts = [
        f"{sum(reasons.values())} after {way} ({', '.join(f'{count} {why}' for why, count in sorted(reasons.items()))})"
        for way, reasons in sorted(row["not_done_after"].items())
    ]
    return f" Refused: {'; '.join(parts)}." if parts else ""


def refused_share(figures: dict[str, float]) -> str:
    """The share of requests that were not done."""
    share = figures["refused"] / figures["requests"]
    return f"{share:.0%}" if share >= 0.1 else f"{share:.2%}"
