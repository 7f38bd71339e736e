"""The load step's plot and its sentence, from a report of benchmarks.autoscale.autoscale."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.common.report import caption


def autoscale_plot(document: dict[str, Any]) -> Figure:
    """Callers, nodes and TTFT over time; each dot is the slowest of two seconds."""
    (row,) = document["rows"]
    looks, first = row["looks"], row["ttft"]
    at = [sample["at"] for sample in looks]
    figure = Figure(figsize=(9, 6), layout="constrained")
    load, nodes, ttft = figure.subplots(3, 1, sharex=True)
    load.step(at, [sample["callers"] for sample in looks], where="post")
    load.set_ylabel("callers")
    nodes.step(at, [sample["desired"] for sample in looks], where="post", label="desired", linestyle="--")
    nodes.step(at, [sample["ready"] for sample in looks], where="post", label="ready")
    nodes.set_ylabel("nodes")
    nodes.set_yticks(range(document["settings"]["pool"]["max"] + 1))
    nodes.legend(frameon=False)
    times = [entry["at"] for entry in first]
    ttft.semilogy(times, [entry["median_s"] for entry in first], label="median")
    ttft.semilogy(times, [entry["most_s"] for entry in first], ".", label="slowest")
    ttft.set_ylabel("TTFT, s")
    ttft.set_xlabel("s")
    ttft.legend(frameon=False)
    for axis in (load, nodes, ttft):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def autoscale_text(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    steps = ", ".join(f"{number} for {seconds:g} s" for number, seconds in settings["steps"])
    text = (
        f"{settings['model']}, {settings['dtype']}; callers: {steps}. {figures['requests']:.0f} requests, "
        f"{figures['lost']:.0f} lost. The first call was held for {figures['held_first_call_s']:.1f} s, until a first "
        f"node was ready; three nodes were ready {figures['three_nodes_after_s']:.1f} s after the step; TTFT p50 "
        f"{figures['ttft_p50_ms_before']:.0f} ms until then and {figures['ttft_p50_ms_three_nodes']:.0f} ms with "
        f"three. {figures['nodes_at_end']:.0f} nodes at the end."
    )
    return f"{caption(document, text)}\n\n![Callers, nodes and TTFT over time](../images/autoscale.svg)"
