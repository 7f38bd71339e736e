"""The rule by which README and docs state figures. `benchmarks.pages.tables` writes them; nobody chooses among results.

- A figure is the median over all rounds of a setting. A figure of several settings is the median over all settings that
  the study measured.
- The worst stands next to it: of one setting the worst round, of several settings the worst setting.
- No round, setting or policy is left out. Where a rule that was committed before the run sets rounds apart, the figure
  over all rounds is the headline, and that of the others stands next to it.
- A figure names the CPU that it was measured on, and that CPU's level (AVX2, AVX512, AVX512-BF16, AMX). Reports that
  were made before the level was recorded say so.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

WIDTH = 100
GLUE = "\0"
"""Stands for a space that no line may end with."""


@dataclass(frozen=True)
class Spread:
    """A figure over its settings, or over the rounds of one setting."""

    median: float
    worst: float
    count: int


def spread(values: Iterable[float], *, lower_is_better: bool) -> Spread:
    """Returns median and worst of all values. Raises StatisticsError if there are none."""
    numbers = list(values)
    return Spread(median(numbers), max(numbers) if lower_is_better else min(numbers), len(numbers))


def ratio_figures(
    name: str, over: Iterable[float], under: Iterable[float], *, lower_is_better: bool
) -> dict[str, float]:
    """Returns the median of the rounds' own ratios under `name`, and the worst round under `{name}_max` or `_min`."""
    ratios = spread((a / b for a, b in zip(over, under, strict=True)), lower_is_better=lower_is_better)
    return {name: ratios.median, f"{name}_{'max' if lower_is_better else 'min'}": ratios.worst}


def host(document: dict[str, Any]) -> str:
    """The GPU, if there is one, and the cores, CPU and CPU level of a report. A study that was held to a lower level
    says so in its settings."""
    machine = document["machine"]
    level = document["settings"].get("level") or machine.get("level") or "level not recorded"
    cores = machine["cores"]
    gpu = f"{machine['gpu']} beside " if machine.get("gpu") else ""
    return f"{gpu}{cores} core{'s' if cores > 1 else ''} of {machine['cpu']} ({level})"


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> str:
    """The paragraph in lines of at most `width` columns, where its words allow it; `indent` begins all but the first.

    No line begins with a sign that Markdown takes for a list.
    """
    glued = re.sub(r" (?=[-+*] )", GLUE, text)
    filled = textwrap.fill(glued, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace(GLUE, " ")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a Markdown table."""
    names = list(head)
    return [_row(names), "|---" * len(names) + "|", *(_row(row) for row in rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
