"""Tables of what tenants get beside others, and of what a service loses when parts of it die."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.report import origin


def fairness_table(document: dict[str, Any]) -> str:
    figures, settings, rows = document["figures"], document["settings"], document["rows"]
    bound = "passes bounded by its performance model" if settings["performance_model"] else "no performance model"
    lines = [
        f"{settings['model']}, {settings['max_rows']} rows, {bound}, median of {settings['rounds']} alternated rounds "
        f"of {settings['round_seconds']:.0f} s. {origin(document)}",
        "",
        "| tenant | weight | share of the service | due |",
        "|---|---|---|---|",
        *(
            f"| {row['tenant']} | {row['weight']:g} | {row['share']:.2%} | {row['due']:.2%} |"
            for row in rows
            if row["part"] == "shares"
        ),
        "",
        "| | TTFT p50 | TTFT p95 | TPOT p50 | served, cost/s |",
        "|---|---|---|---|---|",
    ]
    for case, title in (("alone", "three tenants, without the flood"), ("flood", "beside ten times a share")):
        found = [row for row in rows if row["part"] == "flood" and row["case"] == case]
        ttft, late, tpot = (
            f"{median(row[name] for row in found):.0f} ms" for name in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms")
        )
        lines.append(f"| {title} | {ttft} | {late} | {tpot} | {median(row['served'] for row in found):.0f} |")
    promise = next(row for row in rows if row["part"] == "strict")
    lines += [
        "",
        f"Shares err by {figures['share_error']:.2%} at most. Median TTFT with the flood over that without it: "
        f"{figures['victim_ttft_ratio']:.2f} (worst round {figures['victim_ttft_ratio_max']:.2f}).",
        "",
        f"Calls that are promised {promise['ttft_ms']:.0f} ms TTFT and {promise['tpot_ms']:.0f} ms TPOT, beside three "
        "times the capacity of best effort:",
        "",
        "| class | kept both promises | worst round | TTFT p50 | TTFT p95 | TPOT p50 |",
        "|---|---|---|---|---|---|",
    ]
    for case in ("strict", "standard"):
        found = [row for row in rows if row["part"] == "strict" and row["case"] == case]
        times = (
            f"{median(row[name] for row in found):.0f} ms" for name in ("ttft_p50_ms", "ttft_p95_ms", "tpot_p50_ms")
        )
        kept = f"{figures[f'{case}_attain']:.1%} | {min(row['attain'] for row in found):.1%}"
        lines.append(f"| {case} | {kept} | {' | '.join(times)} |")
    lines += [
        "",
        f"Contention probe: {settings['probe_before_ms']:.2f} ms before, {settings['probe_after_ms']:.2f} ms after.",
    ]
    return "\n".join(lines)


def chaos_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    harm = ", ".join(f"{way} {count}" for way, count in sorted(document["rows"][0]["kills"].items()))
    named = ("requests", "done", "refused", "cut", "wrong_tokens", "unanswered", "lost_acknowledged", "leaked")
    lines = [
        f"{settings['model']}, {settings['seconds'] / 60:.0f} minutes, {settings['callers']} callers, "
        f"{figures['deploys']:.0f} deploys. {origin(document)}",
        "",
        f"| harmed | {' | '.join(name.replace('_', ' ') for name in named)} |",
        "|---" * (len(named) + 1) + "|",
        f"| {figures['kills']:.0f} | {' | '.join(f'{figures[name]:.0f}' for name in named)} |",
        "",
        f"What was harmed: {harm}.",
    ]
    return "\n".join(lines)
