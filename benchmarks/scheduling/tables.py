"""Tables of the routing policies, and of how near the simulator comes to real nodes."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from benchmarks.common.report import caption, captioned_table, probe_text
from benchmarks.common.rule import table, wrapped
from benchmarks.scheduling.policy_cases import bed_cases, rate_title, simulated_cases, verdict

Row = dict[str, Any]


def scheduling_table(document: dict[str, Any]) -> str:
    rows, figures, settings = document["rows"], document["figures"], document["settings"]
    text = f"SLO {settings['slo']}, ranks {settings['ranks']}, {settings['mean_output']} output tokens on average."
    lines = [caption(document, text)]
    for profile in dict.fromkeys(row["profile"] for row in rows):
        of_profile = [row for row in rows if row["profile"] == profile]
        lines += _simulated(profile, of_profile, figures, settings) + _bed(profile, of_profile)
    return "\n".join(lines)


def _simulated(profile: str, rows: list[Row], figures: dict[str, float], settings: dict[str, Any]) -> list[str]:
    whole_rows = [row for row in rows if row["study"] == "sim60" and row["piece"] == "whole"]
    if not whole_rows:
        return []
    lines = ["", f"**Simulated: {settings['sim_nodes']} nodes, `{profile}`, {settings['sim_seconds']:.0f} s**"]
    for title, each in groupby(whole_rows, rate_title):
        lines += ["", f"{title}:", "", *_rate_lines(list(each))]
    attainable = [row["attainable"] for row in whole_rows]
    gap = figures[f"oracle_gap_{profile}"]
    return [
        *lines,
        "",
        wrapped(verdict(simulated_cases(whole_rows))),
        "",
        wrapped(
            f"Empty nodes would keep the SLO of {min(attainable):.2%} to {max(attainable):.2%} of the requests, by "
            f"rate. Mean TPT of rank_aware over the oracle's, on the first {settings['oracle_seconds']:.0f} s: "
            f"{gap:+.1%}. {_refused(whole_rows)} {_decisions(whole_rows)}"
        ),
    ]


def _rate_lines(rows: list[Row]) -> list[str]:
    head = ("policy", "within the SLO", "TPT: mean, p99", "TTFT: p50, p99", "cold starts")
    return table(head, (
        (
            row["policy"], f"{row['attainment']:.2%}",
            f"{row['tpt']['mean'] * 1e3:.1f}, {row['tpt']['p99'] * 1e3:.0f} ms",
            f"{row['ttft']['p50'] * 1e3:.0f}, {row['ttft']['p99'] * 1e3:.0f} ms",
            f"{1 - row['cold_starts'].get('none', 0) / max(1, row['done']):.1%}",
        )
        for row in rows
    ))  # fmt: skip


def _refused(rows: list[Row]) -> str:
    """Renders the share of requests refused by full queues: outside the SLO, and in no mean."""
    shares = [row["rejected"] / row["requests"] for row in rows if row["rejected"]]
    if not shares:
        return "No request found every queue full."
    return f"Where queues were full, {min(shares):.1%} to {max(shares):.1%} of the requests were refused, by policy."


def _decisions(rows: list[Row]) -> str:
    slowest = {row["policy"]: 0.0 for row in rows}
    for row in rows:
        slowest[row["policy"]] = max(slowest[row["policy"]], row["decision_p99_us"])
    return "A decision took, p99 at the worst rate: " + ", ".join(f"{p} {us:.0f} us" for p, us in slowest.items()) + "."


def _bed(profile: str, rows: list[Row]) -> list[str]:
    bed_rows = [row for row in rows if row["study"] == "testbed8"]
    if not bed_rows:
        return []
    lines = ["", f"**Eight nodes timed by `{profile}` behind a real gateway**"]
    for load, each in groupby(bed_rows, lambda row: row["load"]):
        of_load = list(each)
        head = ("policy", "within the SLO", "mean TPT", "TTFT p50", "sent late by at most")
        cells = (
            (
                row["policy"], f"{row['attainment']:.2%}", f"{row['mean_tpt_ms']:.1f} ms",
                f"{row['ttft_p50_ms']:.0f} ms", f"{row['late_max_ms']:.0f} ms",
            )
            for row in of_load
        )  # fmt: skip
        lines += ["", f"Load {load:g}, {of_load[0]['rate']:.1f} requests/s:", "", *table(head, cells)]
    errors = sum(row["errors"] for row in bed_rows)
    slo = f"The SLO is a TPT of {bed_rows[0]['slo_ms']:.1f} ms. {errors} of {_requests(bed_rows)} calls failed."
    return [*lines, "", wrapped(f"{slo} {verdict(bed_cases(bed_rows))}")]


def _requests(rows: list[Row]) -> int:
    return sum(row["requests"] for row in rows)


def fidelity_table(document: dict[str, Any]) -> str:
    figures, settings, rows = document["figures"], document["settings"], document["rows"]
    text = f"{settings['model']}, {settings['nodes']} nodes of one thread, policy {settings['policy']}."
    head = ("load", "correction", "TTFT: real, simulated", "TPT: real, simulated", "within the SLO: real, gap")
    cells = (
        (
            f"{row['load']:g} ({row['requests']} requests)", f"{row['corrected']:.2f}",
            f"{row['ttft_real_ms']:.1f}, {row['ttft_simulated_ms']:.1f} ms",
            f"{row['tpt_real_ms']:.1f}, {row['tpt_simulated_ms']:.1f} ms",
            f"{row['attain_real']:.1%}, {row['attain_gap']:.1%}",
        )
        for row in rows
    )  # fmt: skip
    rest = (
        f"Largest errors of the means: TTFT {figures['ttft_error']:.1%}, TPT {figures['tpt_error']:.1%}; "
        f"overhead {rows[0]['overhead_ms']:.1f} ms; the simulation ran {figures['speedup_over_real_time']:.0f} times "
        f"as fast as time. {probe_text(settings)}"
    )
    return captioned_table(document, text, head, cells, rest)


def placement_table(document: dict[str, Any]) -> str:
    rows = []
    for row in document["rows"]:
        values = (
            f"{row[f'{name}_p50_us']:.0f} ({row[f'{name}_p99_us']:.0f})" for name in ("scoring", "place", "publish")
        )
        nodes = f"{row['nodes']}{', over Redis' if row.get('state') == 'redis' else ''}"
        rows.append((nodes, row["policy"], *values))
    head = ("nodes", "policy", "the choice alone", "routed, reserved, explained", "a record taken in")
    text = f"{document['settings']['requests']} requests, p50 (p99) in us."
    return captioned_table(document, text, head, rows, probe_text(document["settings"]))
