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


def _spans(layer: dict[str, Any], kind: str) -> list[list[float]]:
    if kind == "load":
        return [layer["load"]] if "load" in layer else []
    return [span for span in layer[kind] if span]


def timeline_plot(document: dict[str, Any]) -> Figure:
    """One cold call, layers as rows: when each was loaded, computed by workers and by the device; and its tokens."""
    (row,) = document["rows"]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axis = figure.subplots()
    for at, (kind, (title, colour)) in enumerate(SPANS.items()):
        spans = [(one["layer"], span) for one in row["layers"] for span in _spans(one, kind)]
        axis.barh(
            [layer + 0.27 * (at - 1) for layer, _ in spans], [1e3 * (end - begin) for _, (begin, end) in spans], 0.26,
            left=[1e3 * begin for _, (begin, _) in spans], label=title, color=colour,
        )  # fmt: skip
    for number, at in enumerate(row["tokens_s"]):
        axis.axvline(1e3 * at, color="black", lw=0.6 if number else 1.4, ls="--" if number else "-")
    axis.invert_yaxis()
    axis.set_xlabel("ms since the call was sent (solid line: its first token; dashed: the next ones)")
    cold = row["cold_start"]
    figure.suptitle(
        f"{row['prompt_tokens']} prompt tokens, rank {row['rank']}, {row['column']} workers, simulated link.\n"
        f"The reply: plan {cold['plan']}, load {1e3 * cold['load']:.0f} ms, exposed {1e3 * cold['exposed']:.0f} ms; "
        f"before its end\n{cold['layers_cpu']} layers by CPU workers and {cold['layers_device']} on the device",
        fontsize=9,
    )
    axis.set_ylabel("layer")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure
