"""Figures of the engines study: medians, worst rounds, and comparisons of two servers by the rounds of both."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.coldstart.paired import paired_difference, paired_ratio
from benchmarks.engines.servers import ALONE, GARNISH, TITLES, VLLM
from benchmarks.engines.turns import ADAPTERS, AGAIN, BASE, FIRST

RATIO_AIMS = {1: 0.95, 8: 0.90}
"""Least tokens/s of a node that drives vLLM over those of vLLM's own server, by callers of adapters."""
ADDED_TTFT_AIM_MS = 8.0
"""Most that the node adds to the first token of vLLM's own server, at one caller."""

Rows = Sequence[Mapping[str, Any]]


def key(load: str, callers: int) -> str:
    return f"{load}_{callers}"


def figures_of(rows: Rows, seed: int) -> dict[str, float]:
    """Returns medians, worst values and comparisons. `ratio_*`: tokens/s of the node that drives vLLM over vLLM's own
    server; `engines_*`: our engine over that node."""
    figures: dict[str, float] = {}
    for server in TITLES:
        of_server = [row for row in rows if row["server"] == server]
        figures |= _start_figures(server, [row for row in of_server if row["load"] == "start"])
        figures |= _cold_figures(server, of_server)
        for name, of in _loads(of_server).items():
            figures[f"tok_s_{server}_{name}"] = median(row["tok_s"] for row in of)
            figures[f"ttft_ms_{server}_{name}"] = median(row["ttft_p50_ms"] for row in of)
            figures[f"ttft_ms_max_{server}_{name}"] = max(max(row["ttft_ms"]) for row in of)
    for name in _loads(rows):
        figures |= _ratio(rows, name, seed, "ratio", VLLM, ALONE)
        figures |= _ratio(rows, name, seed, "engines", GARNISH, VLLM)
        figures |= _added(rows, name, seed)
    return figures


def _loads(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """The rows of the timed loads, by load."""
    loads: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["load"] in (BASE, ADAPTERS):
            loads.setdefault(key(row["load"], row["callers"]), []).append(row)
    return loads


def _start_figures(server: str, starts: Rows) -> dict[str, float]:
    if not starts:
        return {}
    seconds = [row["start_s"] for row in starts]
    figures = {f"start_s_{server}": median(seconds), f"start_s_max_{server}": max(seconds)}
    for kind in ("memory_bytes", "device_bytes"):
        if kind in starts[0]:
            figures[f"{kind}_{server}"] = median(row[kind] for row in starts)
    return figures


def _cold_figures(server: str, rows: Rows) -> dict[str, float]:
    """First tokens of adapters that were called for the first time, and of those that had lost their place on the
    device."""
    figures = _spread(f"first_ttft_ms_{server}", (row["ttft_ms"] for row in rows if row["load"] == FIRST))
    again = [row["by_state"].get("host", []) for row in rows if row["load"] == AGAIN]
    return figures | _spread(f"host_ttft_ms_{server}", again)


def _spread(name: str, times: Iterable[Sequence[float]]) -> dict[str, float]:
    values = [value for each in times for value in each]
    return {name: median(values), f"{name}_max": max(values), f"{name}_count": len(values)} if values else {}


def _by_round(rows: Rows, name: str, server: str, column: str) -> dict[Hashable, float]:
    of = _loads([row for row in rows if row["server"] == server]).get(name, [])
    return {row["round"]: row[column] for row in of}


def _ratio(rows: Rows, name: str, seed: int, figure: str, server: str, baseline: str) -> dict[str, float]:
    ours, theirs = (_by_round(rows, name, each, "tok_s") for each in (server, baseline))
    ratio = paired_ratio(ours, theirs, seed)
    if ratio is None:
        return {}
    return {
        f"{figure}_{name}": ratio.median,
        f"{figure}_{name}_lower": ratio.median_lower,
        f"{figure}_{name}_upper": ratio.median_upper,
        f"{figure}_{name}_min": min(ours[each] / theirs[each] for each in ours if each in theirs),
    }


def _added(rows: Rows, name: str, seed: int) -> dict[str, float]:
    """Returns the milliseconds that the node adds to the first token of vLLM's own server, by the rounds' medians."""
    ours, theirs = (_by_round(rows, name, each, "ttft_p50_ms") for each in (VLLM, ALONE))
    added = paired_difference(ours, theirs, seed)
    if added is None:
        return {}
    figure = f"added_ttft_ms_{name}"
    worst = max(ours[each] - theirs[each] for each in ours if each in theirs)
    return {
        figure: added.median, f"{figure}_lower": added.lower, f"{figure}_upper": added.upper, f"{figure}_max": worst
    }  # fmt: skip
