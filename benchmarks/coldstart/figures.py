"""Paired ratios and their intervals, from the rows of benchmarks/coldstart/default.py."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.coldstart.calls import CACHED, ReportedCall, parse_call
from benchmarks.coldstart.decode import AGAIN, CALLERS, NONE, WORKERS
from benchmarks.coldstart.paired import PairedRatio, paired_ratio

Row = dict[str, Any]
KINDS = ("ttft", "tpt", "e2e")
FULL = "full"


def calls_of(row: Row) -> list[list[ReportedCall]]:
    """Returns the calls of a row that count, by burst: those of which all were cold, or all cached."""
    bursts: dict[int, list[ReportedCall]] = {}
    for call in map(parse_call, row["calls"]):
        bursts.setdefault(call.round, []).append(call)
    expected = "none" if row.get("way") == CACHED else "host"
    return [burst for burst in bursts.values() if all(call.state == expected for call in burst)]


def refused(row: Row) -> int:
    """Returns the number of calls that do not count."""
    return len(row["calls"]) - sum(map(len, calls_of(row)))


def time_of(call: ReportedCall, kind: str, tokens: int) -> float:
    """Milliseconds. `tokens`: of each answer."""
    return {"ttft": call.ttft, "e2e": call.e2e, "tpt": call.e2e / tokens}[kind]


def burst_means(row: Row, kind: str) -> dict[Hashable, float]:
    """Returns the mean of each burst, by column and round."""
    return {(cell_of(row), burst[0].round): fmean(time_of(call, kind, 1) for call in burst) for burst in calls_of(row)}


def ratio_of(ours: Row, theirs: Row, kind: str, seed: int) -> PairedRatio | None:
    """Returns the ratio of the means of paired bursts; None if there is no pair."""
    return paired_ratio(burst_means(ours, kind), burst_means(theirs, kind), seed)


def pooled_ratio(rows: Sequence[Row], mode: str, kind: str, seed: int) -> PairedRatio | None:
    """Returns FULL over `mode` from the pairs of all columns in `rows`; None if there is no pair."""

    def all_means(name: str) -> dict[Hashable, float]:
        return {pair: mean for row in rows if row["way"] == name for pair, mean in burst_means(row, kind).items()}

    return paired_ratio(all_means(FULL), all_means(mode), seed)


def columns_by_ratio(rows: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
    """Returns the rows of parts b and c, by part and load : prefill ratio."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        if row["part"] in ("b", "c"):
            groups.setdefault((row["part"], row["ratio"]), []).append(row)
    return groups


def cell_of(row: Row) -> tuple[Any, ...]:
    """Returns the part, ratio, setting, prompt length and burst size, by which rows of all ways are compared."""
    return row["part"], row["ratio"], row["setting"], row["tokens"], row["at_once"]


def cell_name(row: Row) -> str:
    """Returns, of a row of part b or c, the name of its column in figures."""
    burst = f"_burst{row['at_once']}" if row["part"] == "c" else ""
    return f"{row['setting']}_t{row['tokens']}_{row['ratio']}{burst}"


def comparisons(rows: Sequence[Row], seed: int) -> Iterator[tuple[Row, str, str, PairedRatio]]:
    """Yields (row of FULL, the other mode, kind, FULL over it), for every column of parts b and c."""
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
    for (part, load_ratio), columns in columns_by_ratio(rows).items():
        for mode in sorted({row["way"] for row in columns} - {FULL}):
            for kind in KINDS:
                if (pooled := pooled_ratio(columns, mode, kind, seed)) is not None:
                    figures |= _interval(f"full_over_{mode}_{kind}_{part}_{load_ratio}", pooled)
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
    for mode in (WORKERS, AGAIN):
        for callers in CALLERS:
            ratio = decode_ratio(rows, mode, callers, seed)
            if ratio is not None:
                name = f"decode_{mode}_over_none_{callers}"
                figures |= _interval(name, ratio)
                figures |= {f"{name}_median": ratio.median, f"{name}_median_lower": ratio.median_lower}
                figures |= {f"{name}_median_upper": ratio.median_upper}
    return figures


def decode_ratio(rows: Sequence[Row], mode: str, callers: int, seed: int) -> PairedRatio | None:
    """Returns the tokens/s of a service over those of NONE; None if there is no pair."""
    rates: dict[str, dict[Hashable, float]] = {mode: {}, NONE: {}}
    for row in rows:
        if row["part"] == "d" and row["callers"] == callers and row["way"] in rates:
            rates[row["way"]][row["round"]] = row["tok_s"]
    return paired_ratio(rates[mode], rates[NONE], seed)
