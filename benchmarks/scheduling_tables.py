"""Tables of the placement policies, and of how near the simulator comes to real nodes."""

from __future__ import annotations

from typing import Any

from benchmarks.report import origin


def scheduling_table(document: dict[str, Any]) -> str:
    rows, figures, settings = document["rows"], document["figures"], document["settings"]
    lines = [
        f"SLO {settings['slo']}, ranks {settings['ranks']}, {settings['mean_output']} output tokens on average. "
        f"{origin(document)}"
    ]
    for profile in dict.fromkeys(row["profile"] for row in rows):
        lines += _simulated(profile, rows, figures, settings) + _bed(profile, rows)
    return "\n".join(lines)


def _simulated(
    profile: str, rows: list[dict[str, Any]], figures: dict[str, float], settings: dict[str, Any]
) -> list[str]:
    found = [row for row in rows if row["study"] == "sim60" and row["profile"] == profile and row["piece"] == "whole"]
    if not found:
        return []
    lines = [
        "",
        f"**Simulated: {settings['sim_nodes']} nodes, `{profile}`, {settings['sim_seconds']:.0f} s**",
        "",
        "| requests/s | left out | policy | within the SLO | mean TPT | TPT p99 | TTFT p50 | TTFT p99 "
        "| cold starts | utilisation | decision p99 |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        cold = 1 - row["cold_starts"].get("none", 0) / max(1, row["done"])
        lines.append(
            f"| {row['rate']:.3g} | top {row['without_top']} | {row['policy']} | {row['attainment']:.2%} "
            f"| {row['tpt']['mean'] * 1e3:.1f} ms | {row['tpt']['p99'] * 1e3:.1f} ms "
            f"| {row['ttft']['p50'] * 1e3:.0f} ms | {row['ttft']['p99'] * 1e3:.0f} ms "
            f"| {cold:.1%} | {row['utilisation']:.0%} | {row['decision_p99_us']:.0f} us |"
        )
    kept = [row["attainable"] for row in found]
    lines += ["", f"Empty nodes would keep the SLO of {min(kept):.2%} to {max(kept):.2%} of the requests, by rate."]
    gap = figures[f"oracle_gap_{profile}"]
    lines += [
        "",
        f"Mean TPT of rank_aware over the oracle's, on the first {settings['oracle_seconds']:.0f} s: {gap:+.1%}.",
    ]
    return lines


def _bed(profile: str, rows: list[dict[str, Any]]) -> list[str]:
    found = [row for row in rows if row["study"] == "testbed8" and row["profile"] == profile]
    if not found:
        return []
    lines = [
        "",
        f"**Eight nodes timed by `{profile}` behind a real gateway** (each a process; client and gateway share the "
        "cores with them)",
        "",
        "| policy | load | requests/s | within the SLO | mean TPT | TTFT p50 | errors | sent late by at most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['policy']} | {row['load']:g} | {row['rate']:.1f} | {row['attainment']:.2%} "
        f"| {row['mean_tpt_ms']:.1f} ms | {row['ttft_p50_ms']:.0f} ms | {row['errors']} | {row['late_max_ms']:.0f} ms |"
        for row in found
    ]


def fidelity_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    lines = [
        f"{settings['model']}, {settings['nodes']} nodes of one thread, policy {settings['policy']}. "
        f"{origin(document)}",
        "",
        "| load | requests | the nodes' correction | TTFT, real | simulated | TPT, real | simulated "
        "| within the SLO, real | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['load']:g} | {row['requests']} | {row['corrected']:.2f} "
        f"| {row['ttft_real_ms']:.1f} ms | {row['ttft_simulated_ms']:.1f} ms "
        f"| {row['tpt_real_ms']:.1f} ms | {row['tpt_simulated_ms']:.1f} ms "
        f"| {row['attain_real']:.1%} | {row['attain_gap']:.1%} |"
        for row in document["rows"]
    ]
    lines += [
        "",
        f"Largest errors of the means: TTFT {figures['ttft_error']:.1%}, TPT {figures['tpt_error']:.1%}; "
        f"overhead {document['rows'][0]['overhead_ms']:.1f} ms; the "
        f"simulation ran {figures['speedup_over_real_time']:.0f} times as fast as time. Contention probe: "
        f"{settings['probe_before_ms']:.2f} ms before, {settings['probe_after_ms']:.2f} ms after.",
    ]
    return "\n".join(lines)
