"""Draws the plots of docs/images/ from the reports in benchmarks/results/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.autoscale.tables import autoscale_plot
from benchmarks.common.report import RESULTS, ROOT, load
from benchmarks.perfmodel.tables import perfmodel_plot

IMAGES = ROOT / "docs" / "images"
ALLOCATORS = {"pages": "pages (Garnish)", "slots": "fixed slots", "bestfit": "best fit", "slora": "unified rows"}
WIDTH = 4096
STYLE: dict[Any, Any] = {"svg.hashsalt": "garnish"}
"""The same report gives the same bytes."""


def memory_plot(document: dict[str, Any]) -> Figure:
    """Utilisation and fragmentation of each case, a bar per allocator."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        name = f"{row['base']}\n{row['targets']}, {row['pool_gib']} GiB\nwithout top {row['without_top']}"
        cases.setdefault(name, {})[row["allocator"]] = row
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, key in zip(axes, ("utilisation", "fragmentation"), strict=True):
        bars = {title: [case[name][key] for case in cases.values()] for name, title in ALLOCATORS.items()}
        _grouped_bars(axis, bars, list(cases))
        axis.set_ylabel(f"{key}\n(share of the pool)")
    axes[0].legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def cpu_plot(document: dict[str, Any]) -> Figure:
    """A decode step's LoRA on q,k,v of eight requests: compiled, torch, and a plain read of the same bytes."""
    rows = [row["cpu"] for row in document["rows"] if "cpu" in row]
    titles = {"compiled_ms": "compiled operator", "torch_ms": "torch", "read_ms": "plain read of the bytes"}
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    axis = figure.subplots()
    names = [f"{row['model']}\n{row['dtype']}\n{row['ranks']} ranks" for row in rows]
    _grouped_bars(axis, {title: [row[key] for row in rows] for key, title in titles.items()}, names)
    axis.set_ylabel("ms per step")
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def floor_plot(document: dict[str, Any]) -> Figure:
    """Adapter bytes that a decode step's q,k,v of one layer must read, over the batch's size."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in document["rows"]:
        if row.get("operation") == "decode" and f" {WIDTH}->" in row["shape"]:
            requests, ranks = row["shape"].split()[1].split("x")[0], row["shape"].split(" rank ")[1].split()[0]
            lines.setdefault(ranks, []).append((int(requests), row["weight_bytes"] / (1 << 20)))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axis = figure.subplots()
    for ranks, points in lines.items():
        axis.loglog(*zip(*sorted(points), strict=True), marker="o", label=f"rank {ranks}")
    axis.set_xlabel("requests (at most 32 distinct adapters)")
    axis.set_ylabel("MiB read, bf16")
    axis.legend(frameon=False)
    return figure


def _grouped_bars(axis: Axes, bars: dict[str, list[float]], names: list[str]) -> None:
    width = 0.8 / len(bars)
    for i, (title, values) in enumerate(bars.items()):
        axis.bar([at + (i - (len(bars) - 1) / 2) * width for at in range(len(names))], values, width, label=title)
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure.savefig(file, metadata={"Date": None})


def main() -> None:
    memory, kernels = load("memory"), load("kernels")
    save(memory_plot(memory), IMAGES / "memory.svg")
    save(cpu_plot(kernels), IMAGES / "kernels-cpu.svg")
    save(floor_plot(kernels), IMAGES / "kernels-floor.svg")
    if (RESULTS / "perfmodel.json").exists():
        save(perfmodel_plot(load("perfmodel")), IMAGES / "perfmodel-residuals.svg")
    if (RESULTS / "autoscale.json").exists():
        save(autoscale_plot(load("autoscale")), IMAGES / "autoscale.svg")


if __name__ == "__main__":
    main()
