"""Tables of the ablation: the effect of each term of `rank_aware`, and the final policy against the others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.common.report import captioned_table
from benchmarks.common.rule import table
from benchmarks.scheduling.ablation import LENGTHS, paired

Row = dict[str, Any]
STUDIES = {"sim60": "SIM-60", "testbed8": "TESTBED-8"}
CASES = {"exact": "", "error": ", error and shifts"}
KEPT, BEFORE = "kept", "today"
"""Names, in the confirming run, of the policy that the screen left, and of the one before."""
FUNCTIONS = "385 measured functions resampled to"


def screen_table(document: dict[str, Any]) -> str:
    """Each variant less `rank_aware`."""
    rows, settings = document["rows"], document["settings"]
    ours, places = "rank_aware", list(dict.fromkeys((row["study"], row["profile"]) for row in rows))
    head = ("variant", *(f"{STUDIES[study]}, `{profile}`" for study, profile in places), "worst case", "best case")
    cells = []
    for variant in dict.fromkeys(row["variant"] for row in rows if row["variant"] != ours):
        means = (_mean(_of(rows, study=study, profile=profile), variant, ours) for study, profile in places)
        single = [(_mean(each, variant, ours), _title(each[0])) for each in _cells(rows)]
        worst, best = min(single), max(single)
        cells.append((variant, *(_points(value) for value in means), *(f"{_points(v)}: {t}" for v, t in (worst, best))))
    text = (
        f"Simulated, the half on which terms were chosen: {settings['sim_nodes']} nodes in "
        f"place of SIM-60's 60, {FUNCTIONS} {settings['functions']:,}, with a like share of its calls, "
        f"{settings['sim_seconds']:.0f} s; TESTBED-8 {settings['ablate_bed_seconds']:.0f} s. Points of SLO attainment "
        "against `rank_aware`, mean over loads and cases; the worst and the best of them."
    )
    return captioned_table(_seeded(document), text, head, cells)


def confirmed_table(document: dict[str, Any]) -> str:
    """Renders the final policy against the one before and `toppings`."""
    rows, settings = document["rows"], document["settings"]
    baselines = {BEFORE: "the one before", "toppings": "`toppings`"}
    head = ("case", "within the SLO", "goodput", *(f"over {name}" for name in baselines.values()))
    cells = []
    for each in _cells(rows):
        ours = [row for row in each if row["variant"] == KEPT]
        differences = (
            f"{_spread(paired(each, 'attainment', KEPT, baseline), 100)} points, {_goodput(each, baseline):+.1%}"
            for baseline in baselines
        )
        attainment, good = mean(row["attainment"] for row in ours), mean(row["goodput"] for row in ours)
        cells.append((_title(each[0]), f"{attainment:.1%}", f"{good:.1f}/s", *differences))
    text = (
        f"Simulated, the half that chose nothing, run once: {settings['sim_nodes']} nodes, "
        f"{FUNCTIONS} {settings['functions']:,}, {settings['sim_seconds']:.0f} s; TESTBED-8 "
        f"{settings['ablate_bed_seconds']:.0f} s. Differences are paired over seeds, with their 95% interval; goodput "
        "after them."
    )
    worst = []
    for baseline in baselines:
        each = min(_cells(rows), key=lambda each: paired(each, "attainment", KEPT, baseline)[0])
        difference = _spread(paired(each, "attainment", KEPT, baseline), 100)
        worst.append(f"Worst case against {baselines[baseline]}: {difference} points ({_title(each[0])}).")
    verdict = " ".join(worst)
    return captioned_table(_seeded(document), text, head, cells, verdict)


def length_table(document: dict[str, Any]) -> str:
    """Renders SLO attainment by the length of the answer."""
    rows = [row for row in document["rows"] if row["variant"] == KEPT and row["case"] == "exact"]
    names = [*(f"{bound}" for bound in LENGTHS), "more"]
    head = ("answers of up to", *(f"{name} tokens" if name != "more" else name for name in names))
    cells = []
    for each in _cells(rows):
        attainment = (mean(row["by_length"][name][1] for row in each) for name in names)
        share = (mean(row["by_length"][name][0] for row in each) for name in names)
        cells.append((_title(each[0]), *(f"{k:.1%} of {s:.1%}" for k, s in zip(attainment, share, strict=True))))
    text = "Within the SLO, of answers so long, and their share of all calls:"
    return "\n".join([text, "", *table(head, cells)])


def _cells(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows of each study, profile, load and case."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["study"], row["profile"], -row["load"], row["case"] != "exact")):
        groups.setdefault((row["study"], row["profile"], row["load"], row["case"]), []).append(row)
    return list(groups.values())


def _of(rows: Sequence[Row], **values: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def _mean(rows: Sequence[Row], variant: str, against: str) -> float:
    return mean(paired(each, "attainment", variant, against)[0] for each in _cells(rows))


def _goodput(rows: Sequence[Row], baseline: str) -> float:
    means = {name: mean(row["goodput"] for row in rows if row["variant"] == name) for name in (KEPT, baseline)}
    return float(means[KEPT] / means[baseline] - 1)


def _title(row: Row) -> str:
    return f"{STUDIES[row['study']]} `{row['profile']}` {row['load']:g}{CASES[row['case']]}"


def _seeded(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the document with the seeds of its rows."""
    seeds = sorted({row["seed"] for row in document["rows"]})
    return document | {"seed": f"{seeds[0]} to {seeds[-1]}"}


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def _spread(interval: tuple[float, float], scale: float) -> str:
    return f"{scale * interval[0]:+.1f} ± {scale * interval[1]:.1f}"
