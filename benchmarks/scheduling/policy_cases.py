"""Comparison of one policy with the best of the others, at every measured rate, also where another policy wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.rule import Spread, spread, table

OURS = "rank_aware"


@dataclass(frozen=True)
class Result:
    policy: str
    tpt_ms: float
    attainment: float


@dataclass(frozen=True)
class Case:
    """All policies under the same requests."""

    title: str
    ours: Result
    other_results: tuple[Result, ...]

    @property
    def fastest_other(self) -> Result:
        return min(self.other_results, key=lambda result: result.tpt_ms)

    @property
    def steadiest_other(self) -> Result:
        """The other policy with the highest SLO attainment."""
        return max(self.other_results, key=lambda result: result.attainment)

    @property
    def tpt_ratio(self) -> float:
        """Our mean TPT over that of the fastest other policy; below 1 is better."""
        return self.ours.tpt_ms / self.fastest_other.tpt_ms

    @property
    def attainment_gap(self) -> float:
        """Our SLO attainment less the best other one; above 0 is better."""
        return self.ours.attainment - self.steadiest_other.attainment


def bed_cases(rows: Sequence[dict[str, Any]]) -> list[Case]:
    """Returns the cases of TESTBED-8: each profile at each load."""
    by_title: dict[str, list[Result]] = {}
    for row in rows:
        if row["study"] == "testbed8":
            result = Result(row["policy"], row["mean_tpt_ms"], row["attainment"])
            by_title.setdefault(f"`{row['profile']}`, load {row['load']:g}", []).append(result)
    return [_case(title, results) for title, results in by_title.items()]


def simulated_cases(rows: Sequence[dict[str, Any]]) -> list[Case]:
    """Returns the cases of SIM-60: each profile at each rate, with and without the ten hottest functions."""
    by_title: dict[str, list[Result]] = {}
    for row in rows:
        if row["study"] == "sim60" and row["piece"] == "whole":
            result = Result(row["policy"], row["tpt"]["mean"] * 1e3, row["attainment"])
            by_title.setdefault(f"`{row['profile']}`, {rate_title(row)}", []).append(result)
    return [_case(title, results) for title, results in by_title.items()]


def rate_title(row: dict[str, Any]) -> str:
    hottest = f", without the {row['without_top']} hottest functions" if row["without_top"] else ""
    return f"{row['rate']:.3g} requests/s{hottest}"


def _case(title: str, results: list[Result]) -> Case:
    (ours,) = (result for result in results if result.policy == OURS)
    return Case(title, ours, tuple(result for result in results if result.policy != OURS))


def ratios(cases: Sequence[Case]) -> tuple[Spread, Spread]:
    """Returns the spreads of mean TPT over the best other policy's, and of attainment less the best other one."""
    return (
        spread((case.tpt_ratio for case in cases), lower_is_better=True),
        spread((case.attainment_gap for case in cases), lower_is_better=False),
    )


def verdict(cases: Sequence[Case]) -> str:
    """Renders, in a sentence, how often our policy is the best one, and by how much."""
    tpt, attainment = ratios(cases)
    faster = sum(case.tpt_ratio < 1 for case in cases)
    steadier = sum(case.attainment_gap > 0 for case in cases)
    return (
        f"`{OURS}` has the lowest mean TPT in {faster} of {len(cases)} cases and the highest SLO attainment in "
        f"{steadier}. Against the best other policy of each case its TPT is {tpt.median:.2f} times in the median and "
        f"{tpt.worst:.2f} at worst, its attainment {_points(attainment.median)} in the median and "
        f"{_points(attainment.worst)} at worst."
    )


def _points(gap: float) -> str:
    return f"{100 * gap:+.1f} points"


def case_lines(cases: Sequence[Case]) -> list[str]:
    """A table with a row for each case."""
    head = ("case", f"{OURS}: mean TPT", "best other", f"{OURS}: within the SLO", "best other")
    return table(head, (
        (
            case.title, f"{case.ours.tpt_ms:.1f} ms",
            f"{case.fastest_other.tpt_ms:.1f} ms, {case.fastest_other.policy}",
            f"{case.ours.attainment:.1%}", f"{case.steadiest_other.attainment:.1%}, {case.steadiest_other.policy}",
        )
        for case in cases
    ))  # fmt: skip
