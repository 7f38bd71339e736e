"""The tables of benchmarks/coldstart/default.py, for docs/design/cold-start.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.coldstart.calls import CACHED, ReportedCall
from benchmarks.coldstart.decode import AGAIN, CALLERS, NONE, WORKERS
from benchmarks.coldstart.figures import (
    FULL,
    KINDS,
    calls_of,
    cell_name,
    comparisons,
    decode_ratio,
    pooled_ratio,
    refused,
    time_of,
)
from benchmarks.coldstart.paired import PairedRatio
from benchmarks.common.report import caption, captioned_table, probe_text
from benchmarks.common.rule import table, wrapped

Row = dict[str, Any]
STUDY = "coldstart_default"
PARTS = {"b": "Single calls", "c": "Bursts"}
BOUND = "full_over_cached_{name}"
"""Figure of link_bytes.json: what the bytes that cross the link leave possible, in TTFT."""
STORE_RATIOS = {
    "ttft_over_bound": "TTFT over bound",
    "cold_over_bound": "E2E over bound",
    "cold_over_plain": "E2E over bound with a plain client's fetch",
    "cold_over_warm": "E2E over warm, short fetches",
}
WAY_NAMES = {"auto": "`auto` (the default)", "wait": "`wait`: load, then compute"}


def default_table(reports: Mapping[str, Row]) -> str:
    """Renders all reports of the study, each with its commit. The bound of FULL over CACHED stands in the table if
    link_bytes.json is there."""
    bounds = reports.get("link_bytes", {}).get("figures", {})
    documents = [reports[name] for name in sorted(reports) if reports[name].get("study") == STUDY]
    return "\n\n".join(_report(document, bounds) for document in documents) or "Not measured yet."


def _report(document: Row, bounds: Mapping[str, float]) -> str:
    rows, settings = document["rows"], document["settings"]
    probes = settings["probes_ms"]
    sizes = settings["sizes"]
    text = (
        f"Simulated links. {settings['model']}, answers of {sizes['tokens']} tokens. adapter_memory holds "
        f"{sizes['room']} adapters of rank {settings['link_rank']} in all files of parts b and c. A warm prompt of "
        f"{settings['link_tokens']} tokens takes {_prefill(settings)}. Contention probe: {probes[0]:.2f} ms before, "
        f"{max(probes[1:]):.2f} ms at most after a part."
    )
    lines = [caption(document, text), "", *_workers(rows), *_decode(rows, document["seed"])]
    for part, title in PARTS.items():
        for ratio in dict.fromkeys(row["ratio"] for row in rows if row["part"] == part):
            here = [row for row in rows if row["part"] == part and row["ratio"] == ratio]
            rate = here[0]["link_bytes_s"] / 1e6
            lines += [wrapped(f"**{title}, load : prefill {ratio:g}**, a link of {rate:.1f} MB/s"), ""]
            lines += [*_times(here, sizes["tokens"]), "", *_ratios(here, bounds, document["seed"]), ""]
    return "\n".join(lines).rstrip()


def _prefill(settings: Row) -> str:
    measured = settings["measured"]
    return f"{measured['prefill_s'] * 1e3:.0f} ms" if measured else "a time that was not measured"


def _workers(rows: Sequence[Row]) -> list[str]:
    """Renders the number of CPU workers of each service with its reason, and the calls of part a."""
    cells = dict.fromkeys((_service(row), _count(row), row["reason"]) for row in rows if "reason" in row)
    lines = [*table(("service", "CPU workers", "reason"), cells), ""] if cells else []
    for row in rows:
        if row["part"] == "a":
            calls = [call for burst in calls_of(row) for call in burst]
            lines += [wrapped(f"Cold calls at 20 MB/s and no other key: {_layers(calls)}{_left_out(row)}."), ""]
    return lines


def _count(row: Row) -> str:
    """Renders the number of CPU workers, and the one after the calls if it is another."""
    before, after = row["cpu_workers"], row.get("cpu_workers_after", row["cpu_workers"])
    return str(before) if before == after else f"{before}, then {after}"


def _service(row: Row) -> str:
    if row["part"] == "e":
        return "no simulation"
    return "20 MB/s" if row["part"] == "a" else f"{row['ratio']:g}, {row['way']}"


def _layers(calls: Sequence[ReportedCall]) -> str:
    layers = ", ".join(f"{call.layers_cpu} ({call.plan})" for call in calls)
    return f"layers computed by CPU workers {layers or 'not known, for no call found its adapter in host memory'}"


def _decode(rows: Sequence[Row], seed: int) -> list[str]:
    cells = []
    for mode, title in ((WORKERS, "with workers"), (AGAIN, "another without")):
        for callers in CALLERS:
            ratio = decode_ratio(rows, mode, callers, seed)
            if ratio is not None:
                middle = f"{ratio.median:.2f} ({ratio.median_lower:.2f} to {ratio.median_upper:.2f})"
                rates = (_tokens_per_second(rows, each, callers) for each in (mode, NONE))
                cells.append((f"{title}, {callers}; {ratio.pairs} pairs", *rates, interval(ratio), middle))
    head = ("decoding alone: service, callers", "tokens/s", "tokens/s without workers", "ratio: mean", "median")
    return [*table(head, cells), ""] if cells else []


def _tokens_per_second(rows: Sequence[Row], mode: str, callers: int) -> str:
    rates = [row["tok_s"] for row in rows if row["part"] == "d" and (row["way"], row["callers"]) == (mode, callers)]
    return f"{np.median(rates):.1f}"


def _times(rows: Sequence[Row], tokens: int) -> list[str]:
    """p50 and p95 of all calls that count."""
    cells = []
    for row in rows:
        calls = [call for burst in calls_of(row) for call in burst]
        times = (_percentiles([time_of(call, kind, tokens) for call in calls]) for kind in KINDS)
        plans = ", ".join(f"{count} {plan}" for plan, count in _counts(calls).items())
        cells.append((f"{_title(row)}: {row['way']}", *times, plans + _left_out(row)))
    return table(("p50, p95 in ms", "TTFT", "TPT", "E2E", "plans"), cells)


def _counts(calls: Sequence[ReportedCall]) -> dict[str, int]:
    plans = [call.plan for call in calls]
    return {plan: plans.count(plan) for plan in sorted(set(plans))}


def _left_out(row: Row) -> str:
    return f"; {count} refused" if (count := refused(row)) else ""


def _percentiles(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in np.percentile(values, (50, 95))) if values else "-"


def _ratios(rows: Sequence[Row], bounds: Mapping[str, float], seed: int) -> list[str]:
    by_column: dict[tuple[str, str], list[PairedRatio]] = {}
    names: dict[str, str] = {}
    for row, mode, _, ratio in comparisons(rows, seed):
        by_column.setdefault((_title(row), mode), []).append(ratio)
        names[_title(row)] = cell_name(row)
    cells = []
    for (title, mode), ratios in by_column.items():
        cells.append((f"{title}: over {mode}", *map(interval, ratios), str(ratios[0].pairs)))
        bound = bounds.get(BOUND.format(name=names[title]))
        if mode == CACHED and bound is not None:
            cells.append((f"{title}: over {mode}, the bound", f"{bound:.2f}", "-", "-", "-"))
    for mode in dict.fromkeys(mode for _, mode in by_column):
        pooled = [each for kind in KINDS if (each := pooled_ratio(rows, mode, kind, seed)) is not None]
        cells.append((f"all: over {mode}", *map(interval, pooled), str(pooled[0].pairs)))
    return table((FULL, "TTFT", "TPT", "E2E", "pairs"), cells)


def interval(ratio: PairedRatio) -> str:
    return f"{ratio.mean:.2f} ({ratio.lower:.2f} to {ratio.upper:.2f})"


def _title(row: Row) -> str:
    burst = f", {row['at_once']} at once" if row["part"] == "c" else ""
    return f"{row['setting']}, {row['tokens']} tokens{burst}"


def remote_store_table(document: dict[str, Any]) -> str:
    """Renders the times of cold calls from a far registry (remote_store.py), by mode: median and worst."""
    settings, figures = document["settings"], document["figures"]
    text = (
        f"{settings['model']}, {settings['adapters']} adapters of ranks "
        f"{', '.join(map(str, settings['ranks']))}, {settings['tokens']} prompt and output tokens, one call at a time "
        f"over HTTP; {settings['rate'] / 1e6:g} MB/s and {1e3 * settings['delay']:g} ms a request to the store. Median "
        "over the adapters, the worst in brackets."
    )
    measured = {name: title for name, title in STORE_RATIOS.items() if f"{name}_auto" in figures}
    cells = []
    for mode in settings["ways"]:
        ratios = [f"{figures[f'{name}_{mode}']:.2f} ({figures[f'{name}_{mode}_max']:.2f})" for name in measured]
        cells.append((WAY_NAMES[mode], *ratios))
    head = ("`node.cold_start`", *measured.values())
    rows = [row for row in document["rows"] if row["way"] == "auto"]
    after = [(row["cold_e2e_s"] - row["cold_ttft_s"]) / (row["warm_e2e_s"] - row["warm_ttft_s"]) for row in rows]
    notes = (
        f"With `auto`, the time after the first token is {median(after):.2f} times that of the warm call (worst "
        f"{max(after):.2f}). {probe_text(settings)}"
    )
    if "plain_over_fetch_auto" in figures:
        notes += (
            f" A plain client's GET of the same bytes just before each call takes "
            f"{figures['plain_over_fetch_auto']:.2f} times what rate and delay allow (worst "
            f"{figures['plain_over_fetch_auto_max']:.2f}): store, network and client share the host's cores."
        )
    return captioned_table(document, text, head, cells, notes)
