"""Plots of simulated runs. Needs matplotlib, which the service does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from garnish.simulation.outcome import values
from garnish.simulation.simulator import Simulator
from garnish.simulation.slo import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class NoPlots(RuntimeError):
    """matplotlib is not installed; the message says what to do."""


def plot(file: Path, simulator: Simulator, slo: Slo, sweep: Mapping[int, float], wanted: float, title: str) -> None:
    """Draws the distributions of TTFT and TPT and, of a sweep (nodes -> attainment), attainment by nodes, into `file`,
    whose ending chooses the format. Raises NoPlots, ValueError, OSError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise NoPlots("plots need matplotlib: pip install matplotlib, or leave --plot out") from None
    figure = Figure(figsize=(5 * (3 if sweep else 2), 4), layout="constrained")
    axes = figure.subplots(1, 3 if sweep else 2)
    for axis, measure, bound in zip(axes, ("ttft", "tpt"), (slo.ttft, slo.tpt), strict=False):
        _cumulative(axis, values(simulator.jobs, measure, simulator.profile.overhead), bound)
        axis.set_xlabel(f"{measure.upper()}, ms")
    axes[0].set_ylabel("share of requests")
    if sweep:
        axes[2].plot(sorted(sweep), [sweep[nodes] for nodes in sorted(sweep)], marker="o")
        axes[2].axhline(wanted, linestyle="--", color="grey")
        axes[2].set_xlabel("nodes")
        axes[2].set_ylabel("SLO attainment")
    figure.suptitle(f"Simulated: {title}")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _cumulative(axis: Axes, found: np.ndarray, bound: float | None) -> None:
    if found.size:
        axis.plot(found * 1e3, np.arange(1, found.size + 1) / found.size)
        axis.set_xscale("log")
    if bound is not None:
        axis.axvline(bound * 1e3, linestyle="--", color="grey")
    axis.set_ylim(0, 1)
