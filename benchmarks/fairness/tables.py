"""The tables of the fairness study, for docs/results/benchmarks.md."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common.report import caption, probe_text
from benchmarks.common.rule import table, wrapped

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
    return "\n".join([
        caption(document, text),
        "",
        *table(("tenant", "weight", "share of the service", "due"), shares),
        "",
        *_flood_lines(document),
        "",
        *_strict_lines(rows),
        "",
        probe_text(settings),
    ])  # fmt: skip


def _flood_lines(document: dict[str, Any]) -> list[str]:
    figures = document["figures"]
    rows = []
    for case, title in (("alone", "three tenants, without the flood"), ("flood", "beside ten times a share")):
        of_case = [row for row in document["rows"] if row["part"] == "flood" and row["case"] == case]
        times = (_worst_ms(of_case, name) for name in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms"))
        rows.append((title, *times, f"{median(row['served'] for row in of_case):.0f}"))
    ratios = ", ".join(
        f"{name} {_text(flood_ratio(document, key))}"
        for name, key in (("TTFT p50", "ttft_p50_ms"), ("TTFT p95", "ttft_p95_ms"), ("TPOT p50", "tpot_p50_ms"))
    )
    rest = f"Shares err by {figures['share_error']:.2%} at most. With the flood over without it, by round: {ratios}."
    return [*table(("", "TTFT p50", "TTFT p95", "TPOT p50", "served, cost/s"), rows), "", wrapped(rest)]


def flood_ratio(document: dict[str, Any], key: str) -> tuple[float, float]:
    """Returns the other tenants' time with the flood over that without it: median and worst of the rounds."""
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
        of_case = [row for row in calls if row["case"] == case]
        attainment = f"{median(row['attain'] for row in of_case):.1%} ({min(row['attain'] for row in of_case):.1%})"
        times = (_worst_ms(of_case, name) for name in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms"))
        cells.append((case, attainment, *times))
    slo = f"{calls[0]['ttft_ms']:.0f} ms TTFT and {calls[0]['tpot_ms']:.0f} ms TPOT"
    text = f"Calls with an SLO of {slo}, beside three times the capacity of best effort:"
    return [text, "", *table(("class", "within both", "TTFT p50", "TTFT p95", "TPOT p50"), cells)]


def _worst_ms(rows: list[Row], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{median(values):.0f} ms ({max(values):.0f})"
