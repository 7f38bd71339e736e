"""Tables of what each mechanism brings where many adapters are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.common.report import caption, probe_text
from benchmarks.common.rule import spread, table, wrapped

Row = dict[str, Any]
NAMES = {
    "ondemand": "on demand, `lru`", "pipeline": "+ cold-start plans", "eviction": "+ `cost`", "forecast": "+ forecasts",
    "oracle": "announced 2 s ahead", "pinned": "everything resident",
}  # fmt: skip


def many_table(document: dict[str, Any]) -> str:
    """Renders the times and costs of each variant."""
    settings, rows = document["settings"], document["rows"]
    text = (
        f"{settings['model']} in {settings['dtype']}, {settings['adapters']:,} adapters of ranks {settings['ranks']} "
        f"({settings['bytes'] / 1e6:,.0f} MB; device {settings['device_bytes'] / 1e6:,.0f} MB, host "
        f"{settings['host_bytes'] / 1e6:,.0f} MB, {settings['link_bytes_s'] / 1e6:.0f} MB/s between them, simulated, "
        f"and {settings['store_bytes_s'] / 1e6:.3g} MB/s from the store), "
        f"{settings['calls']} calls a round of {median(settings['called_adapters']):.0f} adapters, "
        f"{settings['calls_s']:.2f} a second: {settings['utilisation']:g} of capacity, "
        f"{median(settings['faster_than_trace']):.2g} times as fast as the trace. Median of {settings['rounds']} "
        "rounds (worst)."
    )
    measured = [name for name in settings["variants"] if any(row["variant"] == name for row in rows)]
    groups = {name: [row for row in rows if row["variant"] == name] for name in measured}
    callers = [
        (NAMES[name], _cell(of, _cold, "{:.1f} %"), _ttft(of), _cell(of, _e2e, "{:.2f} s"), _goodput(of))
        for name, of in groups.items()
    ]
    costs = [
        (NAMES[name], _hits(of), *(_cost(of, part) for part in ("gateway", "node"))) for name, of in groups.items()
    ]
    return "\n".join([
        caption(document, text),
        "",
        *table(("", "cold calls", "TTFT p50, p95", "E2E p95", "goodput, calls/s"), callers),
        "",
        *table(("", "device, host, absent", "gateway: processor, memory", "node"), costs),
        "",
        wrapped(_rest(document, groups)),
    ])  # fmt: skip


def _rest(document: dict[str, Any], groups: dict[str, list[Row]]) -> str:
    figures, settings = document["figures"], document["settings"]
    errors = sum(sum(row["errors"].values()) for of in groups.values() for row in of)
    text = (
        f"{figures['wrong_tokens']:.0f} texts differ from those of the same adapter called alone, "
        f"{figures['ties']:.0f} more from a tie on; {errors} calls failed."
    )
    if gaps := [row["widest_gap"] for of in groups.values() for row in of if "widest_gap" in row]:
        text += f" The widest gap of two log probabilities at which one differs: {max(gaps):.2g}."
    if "forecast" in groups:
        sums = {kind: sum(row[f"prefetch_{kind}_bytes"] for row in groups["forecast"]) for kind in _KINDS}
        shown = ", ".join(f"{size / 1e6:,.0f} MB {kind}" for kind, size in sums.items())
        text += f" By forecast, {shown} were prefetched."
    for name, sentence in _COMPARED.items():
        if name in figures:
            text += f" {sentence.format(figures[name])}"
    return f"{text} {probe_text(settings)}"


_KINDS = ("useful", "late", "wasted")
_COMPARED = {
    "share_of_oracle": "Forecasts spare {:.2f} of the cold calls that the oracle spares.",
    "goodput_over_ondemand": "Goodput over on demand: {:.2f},",
    "ttft_p95_over_ondemand": "TTFT p95 over on demand: {:.2f}.",
}


def _cell(rows: Sequence[Row], value: Callable[[Row], float], form: str, *, lower_is_better: bool = True) -> str:
    rounds = spread(map(value, rows), lower_is_better=lower_is_better)
    return f"{form.format(rounds.median)} ({form.format(rounds.worst)})"


def _cold(row: Row) -> float:
    return 100 * float(row["cold_share"])


def _e2e(row: Row) -> float:
    return float(row["e2e_p95_ms"]) / 1e3


def _ttft(rows: Sequence[Row]) -> str:
    middle = median(row["ttft_p50_ms"] for row in rows)
    return f"{middle / 1e3:.2f}, " + _cell(rows, lambda row: row["ttft_p95_ms"] / 1e3, "{:.2f} s")


def _goodput(rows: Sequence[Row]) -> str:
    return _cell(rows, lambda row: float(row["goodput"]), "{:.2f}", lower_is_better=False)


def _hits(rows: Sequence[Row]) -> str:
    shares = (median(row[f"{tier}_share"] for row in rows) for tier in ("device", "host", "absent"))
    return ", ".join(f"{100 * share:.0f} %" for share in shares)


def _cost(rows: Sequence[Row], part: str) -> str:
    return f"{median(row[f'{part}_cpu_s'] for row in rows):.1f} s, {median(row[f'{part}_mb'] for row in rows):,.0f} MB"
