"""The tables of docs/design/cold-start.md that come from coldstart.py's report."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, mean, median
from typing import Any

from benchmarks.cold_settings import WHOLE, over_cached_share
from benchmarks.cold_single import FORCED, INTERRUPTING_RPS, PIPELINING_RANKS
from benchmarks.report import caption
from benchmarks.rule import table, wrapped

TITLES = {
    "set_adapter": "PEFT's set_adapter", "cached_all_cores": "cached, all cores",
    "assist_slowed": "assist, slowed workers", "full_slowed": "full, slowed workers",
    "full_fourfold": "full, workers slowed four times more",
}  # fmt: skip
FULL = ("full", "full_slowed", "full_fourfold")
"""The planner's choice, by the speed of the CPU workers."""
MEAN_OF = ("S1", "S2", "S3")
TIMES = ("ttft", "tpt", "e2e")
INSIDE = ("cached", "ondmd", "full", "full_slowed")
"""Ways of which the engine's side is shown."""
COLUMNS = ("fast", "slowed")
"""CPU workers as fast as they are, and slowed to the papers' ratio."""

Row = dict[str, Any]


def over_cached(row: Row, name: str, kind: str) -> list[float]:
    """A variant's mean time over CACHED's, of each round of one setting."""
    rounds = row["rounds"]
    return [each[kind] / cached[kind] for each, cached in zip(rounds[name], rounds["cached"], strict=True)]


def full_settings(document: dict[str, Any], kind: str) -> dict[tuple[str, str], float]:
    """(setting, variant of FULL) -> its time over CACHED, median of its rounds; all that were measured."""
    return {
        (row["part"], name): median(over_cached(row, name, kind))
        for row in document["rows"]
        for name in FULL
        if name in row.get("rounds", {})
    }


def coldstart_table(document: dict[str, Any]) -> str:
    """Every setting and variant, as ratios to CACHED."""
    settings = document["settings"]
    rows = [row for row in document["rows"] if "cached" in row.get("rounds", {}) and row["part"] != "busy"]
    text = (
        f"Simulated link{_links(rows)}. {settings['model']}, {settings['dtype']}, {settings['calls']} calls a round "
        f"(fewer where prompts are long). Means of a round's calls over those of CACHED; median of the rounds, the "
        f"worst round in brackets. {_slowed(rows)}"
    )
    lines = [caption(document, text)]
    for row in rows:
        lines += ["", *_setting_lines(row, document["figures"])]
    lines += _inside_lines([row for row in rows if _has_calls(row)])
    return "\n".join([*lines, *_mean_lines(document), "", f"Contention probe: {_probes(document)}."])


def _mean_lines(document: dict[str, Any]) -> list[str]:
    """FULL's geometric means over MEAN_OF."""
    values = {kind: full_settings(document, kind) for kind in TIMES}
    parts = []
    for name in FULL:
        found = {kind: [value for (part, of), value in values[kind].items() if of == name and part in MEAN_OF]
                 for kind in TIMES}  # fmt: skip
        if all(len(each) == len(MEAN_OF) for each in found.values()):
            means = ", ".join(f"{kind.upper()} {geometric_mean(each):.2f}" for kind, each in found.items())
            parts.append(f"{TITLES.get(name, name)} {means}")
    return ["", wrapped(f"Geometric means over {', '.join(MEAN_OF)}: {'; '.join(parts)}.")] if parts else []


def _setting_lines(row: Row, figures: dict[str, float]) -> list[str]:
    rounds = row["rounds"]
    cells = []
    for name in rounds:
        if name == "cached":
            continue
        ratios = (over_cached(row, name, kind) for kind in TIMES)
        exposed = figures[f"exposed_ms_{name}_{row['part']}"]
        cells.append((
            TITLES.get(name, name), *(f"{median(found):.2f} ({max(found):.2f})" for found in ratios), f"{exposed:.0f}"
        ))  # fmt: skip
    count = len(rounds["cached"])
    head = ("over CACHED", "TTFT", "TPT", "E2E", "exposed, ms a call")
    lines = [f"**{row['part']}**, {count} round{'s' if count > 1 else ''}", "", *table(head, cells)]
    return lines + _percentile_lines(row)


def _has_calls(row: Row) -> bool:
    """Returns whether the report kept each call; older ones did not."""
    return all("calls" in each for rounds in row["rounds"].values() for each in rounds)


def _percentile_lines(row: Row) -> list[str]:
    """The calls of all rounds, of settings in which every way was run."""
    if row["part"] not in WHOLE or not _has_calls(row):
        return []
    cells = [
        (TITLES.get(name, name), *(_shares(row, name, kind) for kind in ("ttft", "tpt", "tpot", "e2e")))
        for name in row["rounds"]
        if name != "cached"
    ]
    return ["", *table((f"{row['part']}, p50 and p95 over CACHED's", "TTFT", "TPT", "TPOT", "E2E"), cells)]


def _shares(row: Row, name: str, kind: str) -> str:
    found = [over_cached_share(row, name, kind, share) for share in (50, 95)]
    return ", ".join("none" if ratio is None else f"{ratio:.2f}" for ratio in found)


def _inside_lines(rows: Sequence[Row]) -> list[str]:
    """What the engine did, and what others' loads cost a request that decodes."""
    cells = []
    for row in rows:
        for name in (name for name in INSIDE if name in row["rounds"]):
            rounds = row["rounds"][name]
            exposed = median(value for each in rounds for value in each["exposed_share"])
            prefill, step = (
                1e3 * median(value for each in rounds for value in each["calls"][kind]) for kind in ("prefill", "step")
            )
            busy = [mean(each[kind] for each in rounds) for kind in ("device_busy", "cpu_busy")]
            cells.append((
                f"{row['part']}, {TITLES.get(name, name)}", f"{exposed:.2f}", f"{prefill:.0f} ms, {step:.0f} ms",
                _shares(row, name, "others_tpot"), " and ".join(f"{share:.0%}" for share in busy),
            ))  # fmt: skip
    head = ("", "exposed share, p50", "prefill, decode step, p50", "others' TPOT, p50 and p95", "engine, workers busy")
    return ["", *table(head, cells)] if cells else []


def _links(rows: Sequence[Row]) -> str:
    rates = [row["link_bytes_s"] for row in rows]
    return f" of {median(rates) / 1e6:.0f} MB/s" if rates else ""


def _slowed(rows: Sequence[Row]) -> str:
    found = [row for row in rows if "repeats" in row]
    if not found:
        return ""
    share, repeats = found[0]["worker_over_prefill"], found[0]["repeats"]["slowed"]
    return f"A worker's part takes {share:.2f} of a prefill; slowed, it repeats its work {repeats} times."


def _probes(document: dict[str, Any]) -> str:
    figures = document["figures"]
    return (
        f"{figures['probe_before_ms']:.2f} ms before, {figures['probe_after_ms']:.2f} ms after, "
        f"{figures.get('probe_max_ms', figures['probe_after_ms']):.2f} ms at most between"
    )


def planning_table(document: dict[str, Any]) -> str:
    """What the planner lost, what the pipeline gained, and how often loads interrupt."""
    figures, parts = document["figures"], {row["part"]: row for row in document["rows"]}
    lines = _regret_lines(figures, parts["regret"]) if "regret" in parts else []
    if "pipelining" in parts:
        lines += ["", wrapped(f"A lone cold prompt of 256 tokens, ASSIST's time over FULL's: {_gains(figures)}.")]
    lines += _rank_lines(parts["ranks"]) if "ranks" in parts else []
    if "interruptions" in parts:
        shares = "; ".join(
            f"{rps} requests/s: {figures[f'interruption_share_{rps}rps']:.0%} of a request's time, "
            f"{figures[f'interruptions_p50_{rps}rps']:.0f} interruptions in the middle"
            for rps in INTERRUPTING_RPS
        )
        lines += ["", wrapped(f"Loads of others that interrupt ONDMD's answers of 32 tokens on average: {shares}.")]
    if "busy" in parts:
        busy = parts["busy"]
        ratios = ", ".join(f"{kind.upper()} {_worst(over_cached(busy, 'full', kind))}" for kind in TIMES)
        rounds = len(busy["rounds"]["full"])
        lines += ["", wrapped(f"The whole service on a busy host, FULL over CACHED, {rounds} rounds: {ratios}.")]
    return "\n".join(lines) or "Not measured yet."


def _rank_lines(row: Row) -> list[str]:
    """Loads by rank, and steps by the ranks of a batch."""
    loads = ", ".join(f"{one['rank']}: {1e3 * median(one['load_s']):.0f} ms" for one in row["loads"])
    steps = ", ".join(f"{one['batch']}: {1e3 * median(one['step_s']):.1f} ms" for one in row["steps"])
    return [
        "", wrapped(f"The load of one adapter by rank: {loads}."),
        "", wrapped(f"A decode step of {row['rows_of_batch']} rows, each with an adapter of its own: {steps}."),
    ]  # fmt: skip


def _worst(ratios: list[float]) -> str:
    return f"{median(ratios):.2f} ({max(ratios):.2f})"


def _gains(figures: dict[str, float]) -> str:
    columns = (
        f"{column} workers " + ", ".join(f"{figures[f'full_over_assist_r{r}_{column}']:.2f} (rank {r})" for r in ranks)
        for column, ranks in ((column, PIPELINING_RANKS) for column in COLUMNS)
    )
    return "; ".join(columns)


def _regret_lines(figures: dict[str, float], regret: Row) -> list[str]:
    text = (
        f"FULL against the best single plan at each of {figures['planner_regret_points']:.0f} points, "
        f"{len(regret['rows'][0]['full'])} rounds: {figures['planner_regret_p50']:+.1%} in the median, "
        f"{figures['planner_regret']:+.1%} at the worst."
    )
    cells = []
    for row in regret["rows"]:
        point = f"{row['tokens']} tokens, link x {row['rate']:g}, {row['loads']} at once, {row['column']} workers"
        cells.append((point, *(f"{1e3 * median(row[name]):.0f} ms" for name in (*FORCED, "full"))))
    return [wrapped(text), "", *table(("prompt, link, loads, workers", "wait", "pipeline", "assist", "full"), cells)]


def streaming_table(document: dict[str, Any]) -> str:
    parts, figures = {row["part"]: row for row in document["rows"]}, document["figures"]
    if "stream" not in parts:
        return "Not measured yet."
    cells = []
    for row in parts["stream"]["rows"]:
        tail = f"{row['ratio']:g}"
        gain = f"{figures[f'stream_gain_{tail}']:.2f}" if f"stream_gain_{tail}" in figures else ""
        over = figures[f"stream_over_ideal_{tail}"], figures[f"stream_over_ideal_as_arrived_{tail}"]
        cells.append((tail, f"{over[0]:.2f}", f"{over[1]:.2f}", gain))
    head = ("fetch : warm prefill", "TTFT over ideal", "over ideal as delivered", "gain over download, then load")
    return "\n".join(table(head, cells))


STORE_RATIOS = {
    "ttft_over_bound": "TTFT over bound",
    "cold_over_bound": "E2E over bound",
    "cold_over_plain": "E2E over bound with a plain client's fetch",
    "cold_over_warm": "E2E over warm, short fetches",
}
WAY_NAMES = {"auto": "`auto` (the default)", "wait": "`wait`: load, then compute"}


def remote_store_table(document: dict[str, Any]) -> str:
    """Of remote_store.py: what a cold call takes, by way, median and worst."""
    settings, figures = document["settings"], document["figures"]
    text = (
        f"{settings['model']}, {settings['adapters']} adapters of ranks "
        f"{', '.join(map(str, settings['ranks']))}, {settings['tokens']} prompt and output tokens, one call at a time "
        f"over HTTP; {settings['rate'] / 1e6:g} MB/s and {1e3 * settings['delay']:g} ms a request to the store. Median "
        "over the adapters, the worst in brackets."
    )
    measured = {name: title for name, title in STORE_RATIOS.items() if f"{name}_auto" in figures}
    cells = []
    for way in settings["ways"]:
        ratios = [f"{figures[f'{name}_{way}']:.2f} ({figures[f'{name}_{way}_max']:.2f})" for name in measured]
        cells.append((WAY_NAMES[way], *ratios))
    head = ("`node.cold_start`", *measured.values())
    rows = [row for row in document["rows"] if row["way"] == "auto"]
    after = [(row["cold_e2e_s"] - row["cold_ttft_s"]) / (row["warm_e2e_s"] - row["warm_ttft_s"]) for row in rows]
    notes = (
        f"With `auto`, the time after the first token is {median(after):.2f} times that of the warm call (worst "
        f"{max(after):.2f}). Contention probe: {settings['probe_before_ms']:.2f} ms before, "
        f"{settings['probe_after_ms']:.2f} ms after."
    )
    if "plain_over_fetch_auto" in figures:
        notes += (
            f" A plain client's GET of the same bytes just before each call takes "
            f"{figures['plain_over_fetch_auto']:.2f} times what rate and delay allow (worst "
            f"{figures['plain_over_fetch_auto_max']:.2f}): store, network and client share the host's cores."
        )
    return "\n".join([caption(document, text), "", *table(head, cells), "", wrapped(notes)])
