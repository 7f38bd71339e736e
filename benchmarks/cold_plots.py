"""Pictures of coldstart.py's report."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.cold_tables import TITLES

SPANS = {"load": ("load", "tab:orange"), "cpu": ("CPU worker", "tab:green"), "device": ("device", "tab:blue")}
SHOWN = ("ondmd", "overlap", "pipeline", "dlora", "assist", "full", "assist_slowed", "full_slowed")


def ratios_plot(document: dict[str, Any]) -> Figure:
    """TTFT over CACHED by setting, a bar per way, with the largest round."""
    figures = document["figures"]
    parts = [row["part"] for row in document["rows"] if f"ttft_over_cached_cached_{row['part']}" in figures]
    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.subplots()
    width = 0.85 / len(SHOWN)
    for i, name in enumerate(SHOWN):
        places = [at for at, part in enumerate(parts) if f"ttft_over_cached_{name}_{part}" in figures]
        values = [figures[f"ttft_over_cached_{name}_{parts[at]}"] for at in places]
        most = [figures[f"ttft_over_cached_{name}_max_{parts[at]}"] for at in places]
        x = [at + (i - (len(SHOWN) - 1) / 2) * width for at in places]
        rise = [max(0.0, high - value) for high, value in zip(most, values, strict=True)]
        axis.bar(x, values, width, label=TITLES.get(name, name), yerr=[[0.0] * len(x), rise], error_kw={"lw": 0.6})
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xticks(range(len(parts)), parts)
    axis.set_ylabel("TTFT over CACHED\n(simulated link)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def timeline_plot(document: dict[str, Any]) -> Figure:
    """One cold request, layers as rows: when each was loaded, and computed by workers and by the device."""
    row = next(row for row in document["rows"] if row["part"] == "timeline")
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    for at, (kind, (title, colour)) in enumerate(SPANS.items()):
        spans = [(one["layer"], one[kind]) for one in row["layers"] if kind in one]
        axis.barh(
            [layer + 0.27 * (at - 1) for layer, _ in spans], [1e3 * (end - begin) for _, (begin, end) in spans], 0.26,
            left=[1e3 * begin for _, (begin, _) in spans], label=title, color=colour,
        )  # fmt: skip
    axis.axvline(1e3 * row["ttft_s"], color="black", lw=0.8)
    axis.invert_yaxis()
    axis.set_xlabel("ms since the request was sent (the line: its first token)")
    figure.suptitle(
        f"A cold prompt of {row['tokens']} tokens, rank {row['rank']}, plan {row['plan']}, {row['column']} workers; "
        "simulated link",
        fontsize=10,
    )
    axis.set_ylabel("layer")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure
