"""The tables of docs/cold-start.md that come from coldstart.py's report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.cold_single import FORCED, INTERRUPTING_RPS, PIPELINING_RANKS
from benchmarks.report import origin

TITLES = {
    "cached_all_cores": "cached, all cores", "assist_slowed": "assist, slowed workers",
    "full_slowed": "full, slowed workers", "full_fourfold": "full, workers slowed four times more",
}  # fmt: skip


def coldstart_table(document: dict[str, Any]) -> str:
    """Every setting and variant, as ratios to CACHED."""
    figures, settings = document["figures"], document["settings"]
    rows = [row for row in document["rows"] if "cached" in row.get("rounds", {}) and row["part"] != "busy"]
    lines = [
        f"Simulated link{_links(rows)}. {settings['model']}, {settings['dtype']}, "
        f"{settings['calls']} calls a round (fewer where prompts are long). {_slowed(rows)}{origin(document)}",
        "",
        "| setting (rounds) | way | TTFT (largest round) | TPT | E2E | exposed, ms a call |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name, each in row["rounds"].items():
            values = {kind: figures[f"{kind}_{name}_{row['part']}"] for kind in ("exposed_ms",)} | {
                kind: figures[f"{kind}_over_cached_{name}_{row['part']}"] for kind in ("ttft", "tpt", "e2e")
            }
            most = figures[f"ttft_over_cached_{name}_max_{row['part']}"]
            lines.append(
                f"| {row['part']} ({len(each)}) | {TITLES.get(name, name)} | {values['ttft']:.2f} ({most:.2f}) "
                f"| {values['tpt']:.2f} | {values['e2e']:.2f} | {values['exposed_ms']:.0f} |"
            )
    lines += ["", f"Contention probe: {_probes(document)}."]
    return "\n".join(lines)


def _links(rows: Sequence[dict[str, Any]]) -> str:
    rates = [row["link_bytes_s"] for row in rows]
    return f" of {median(rates) / 1e6:.0f} MB/s" if rates else ""


def _slowed(rows: Sequence[dict[str, Any]]) -> str:
    found = [row for row in rows if "repeats" in row]
    if not found:
        return ""
    share, repeats = found[0]["worker_over_prefill"], found[0]["repeats"]["slowed"]
    return f"A worker's part takes {share:.2f} of a prefill; slowed, it repeats its work {repeats} times. "


def _probes(document: dict[str, Any]) -> str:
    figures = document["figures"]
    return (
        f"{figures['probe_before_ms']:.2f} ms before, {figures['probe_after_ms']:.2f} ms after, "
        f"{figures.get('probe_max_ms', figures['probe_after_ms']):.2f} ms at most between"
    )


def planning_table(document: dict[str, Any]) -> str:
    """What the planner lost, what the pipeline gained, and how often loads interrupt."""
    figures, parts = document["figures"], {row["part"]: row for row in document["rows"]}
    lines: list[str] = []
    if "regret" in parts:
        lines += [
            f"FULL against the best single plan at each of {figures['planner_regret_points']:.0f} points, "
            f"{len(parts['regret']['rows'][0]['full'])} rounds: "
            f"{figures['planner_regret']:+.1%} at the worst, {figures['planner_regret_p50']:+.1%} in the middle.",
            "",
            "| prompt tokens | link, times | loads at once | workers | wait | pipeline | assist | full |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in parts["regret"]["rows"]:
            seconds = " | ".join(f"{1e3 * median(row[name]):.0f} ms" for name in (*FORCED, "full"))
            lines.append(f"| {row['tokens']} | {row['rate']:g} | {row['loads']} | {row['column']} | {seconds} |")
    if "pipelining" in parts:
        gains = ", ".join(f"rank {rank}: {figures[f'full_over_assist_r{rank}']:.2f}" for rank in PIPELINING_RANKS)
        lines += ["", f"A lone cold prompt of 256 tokens, ASSIST's time over FULL's, slowed workers: {gains}."]
    if "interruptions" in parts:
        shares = "; ".join(
            f"{rps} requests/s: {figures[f'interruption_share_{rps}rps']:.0%} of a request's time, "
            f"{figures[f'interruptions_p50_{rps}rps']:.0f} interruptions in the middle"
            for rps in INTERRUPTING_RPS
        )
        lines += ["", f"Loads of others that interrupt ONDMD's answers of 32 tokens on average: {shares}."]
    if "busy" in parts:
        rounds = len(parts["busy"]["rounds"]["full"])
        ratios = ", ".join(
            f"{kind.upper()} {figures[f'{kind}_over_cached_full_busy']:.2f}" for kind in ("ttft", "tpt", "e2e")
        )
        lines += [
            "",
            f"The whole service on a busy host, FULL over CACHED, {rounds} rounds: {ratios}.",
        ]
    return "\n".join(lines) or "Not measured yet."


def streaming_table(document: dict[str, Any]) -> str:
    parts, figures = {row["part"]: row for row in document["rows"]}, document["figures"]
    if "stream" not in parts:
        return "Not measured yet."
    lines = [
        "| fetch : warm prefill | TTFT over ideal | over the ideal of what the server delivered "
        "| gain over download, then load |",
        "|---|---|---|---|",
    ]
    for row in parts["stream"]["rows"]:
        tail = f"{row['ratio']:g}"
        gain = f"{figures[f'stream_gain_{tail}']:.2f}" if f"stream_gain_{tail}" in figures else ""
        over = figures[f"stream_over_ideal_{tail}"], figures[f"stream_over_ideal_as_arrived_{tail}"]
        lines.append(f"| {tail} | {over[0]:.2f} | {over[1]:.2f} | {gain} |")
    return "\n".join(lines)
