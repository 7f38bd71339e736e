"""Paired ratios and their intervals, from the rows of benchmarks/coldstart/default.py."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.coldstart.calls import CACHED, Kept, parse_kept
from benchmarks.coldstart.decode import CALLERS
from benchmarks.coldstart.paired import PairedRatio, paired_ratio

Row = dict[str, Any]
KINDS = ("ttft", "tpt", "e2e")
FULL = "full"


def calls_of(row: Row) -> list[list[Kept]]:
    """Returns the calls of a row that count, by burst: those of which all were cold, or all cached."""
    bursts: dict[int, list[Kept]] = {}
    for call in map(parse_kept, row["calls"]):
        bursts.setdefault(call.round, []).append(call)
    expected = "none" if row.get("way") == CACHED else "host"
    return [burst for burst in bursts.values() if all(call.state == expected for call in burst)]


def refused(row: Row) -> int:
    """Returns the number of calls that do not count."""
    return len(row["calls"]) - sum(map(len, calls_of(row)))


def time_of(call: Kept, kind: str, tokens: int) -> float:
    """Milliseconds. `tokens`: of each answer."""
    return {"ttft": call.ttft, "e2e": call.e2e, "tpt": call.e2e / tokens}[kind]


def ratio_of(ours: Row, theirs: Row, kind: str, seed: int) -> PairedRatio | None:
    """Returns the ratio of the means of paired bursts; None if there is no pair."""

    def means(row: Row) -> dict[Hashable, float]:
        return {burst[0].round: fmean(time_of(call, kind, 1) for call in burst) for burst in calls_of(row)}

    return paired_ratio(means(ours), means(theirs), seed)


def cell_of(row: Row) -> tuple[Any, ...]:
    """Returns the part, ratio, setting, prompt length and burst size, by which rows of all ways are compared."""
    return row["part"], row["ratio"], row["setting"], row["tokens"], row["at_once"]


def cell_name(row: Row) -> str:
    """Returns, of a row of part b or c, the name of its column in figures."""
    burst = f"_burst{row['at_once']}" if row["part"] == "c" else ""
    return f"{row['setting']}_t{row['tokens']}_{row['ratio']}{burst}"


def comparisons(rows: Sequence[Row], seed: int) -> Iterator[tuple[Row, str, str, PairedRatio]]:
    """Yields (row of FULL, other way, kind, FULL over it), for every column of parts b and c."""
    compared = [row for row in rows if row["part"] in ("b", "c")]
    for ours in (row for row in compared if row["way"] == FULL):
        for theirs in compared:
            if theirs["way"] != FULL and cell_of(theirs) == cell_of(ours):
                for kind in KINDS:
                    if (ratio := ratio_of(ours, theirs, kind, seed)) is not None:
                        yield ours, theirs["way"], kind, ratio


def figures_of(rows: Sequence[Row], seed: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    of_all: dict[str, list[PairedRatio]] = {}
    for row, mode, kind, ratio in comparisons(rows, seed):
        name = f"full_over_{mode}_{kind}"
        of_all.setdefault(name, []).append(ratio)
        figures |= _interval(f"{name}_{cell_name(row)}", ratio) | {f"pairs_{mode}_{cell_name(row)}": ratio.pairs}
    for name, all_found in of_all.items():
        upper = max(each.upper for each in all_found)
        figures |= {name: median(each.mean for each in all_found), f"{name}_upper": upper}
    if called := [row for row in rows if "calls" in row]:
        figures["calls"] = sum(len(row["calls"]) for row in called)
        figures["refused"] = sum(map(refused, called))
    return figures | _slow(rows) | _decode(rows, seed)


def _interval(name: str, ratio: PairedRatio) -> dict[str, float]:
    return {name: ratio.mean, f"{name}_lower": ratio.lower, f"{name}_upper": ratio.upper}


def _slow(rows: Sequence[Row]) -> dict[str, float]:
    """Returns the figures of parts a and e."""
    figures: dict[str, float] = {}
    for row in rows:
        if row["part"] in ("a", "e"):
            figures[f"cpu_workers_{row['part']}"] = row["cpu_workers"]
        if row["part"] == "a" and (calls := [call for burst in calls_of(row) for call in burst]):
            figures["layers_cpu_a"] = min(call.layers_cpu for call in calls)
    return figures


def _decode(rows: Sequence[Row], seed: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for callers in CALLERS:
        ratio = decode_ratio(rows, callers, seed)
        if ratio is not None:
            name = f"decode_over_none_{callers}"
            figures |= _interval(name, ratio)
            figures |= {f"{name}_median": ratio.median, f"{name}_median_lower": ratio.median_lower}
            figures |= {f"{name}_median_upper": ratio.median_upper}
    return figures


def decode_ratio(rows: Sequence[Row], callers: int, seed: int) -> PairedRatio | None:
    """Returns tokens/s with workers over those without."""
    rates: dict[str, dict[Hashable, float]] = {"workers": {}, "none": {}}
    for row in rows:
        if row["part"] == "d" and row["callers"] == callers:
            rates[row["way"]][row["round"]] = row["tok_s"]
    return paired_ratio(rates["workers"], rates["none"], seed)
