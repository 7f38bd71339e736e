"""The table and the plot of the performance model's study."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from benchmarks.common.report import caption, probe_text
from benchmarks.common.rule import wrapped

TERMS = {
    "max_rank": "rows x largest rank", "request_ranks": "sum of ranks over requests",
    "adapter_ranks": "sum of ranks over distinct adapters",
}  # fmt: skip


def perfmodel_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    model = _rows(document, "model")[0]
    decode, prefill = model["model"]["decode"], model["model"]["prefill"]
    counts = {kind: len(_rows(document, kind)) for kind in ("decode", "prefill", "grid")}
    bgmv, mbgmv = (
        next(row for row in _rows(document, "paper") if row["kernel"] == kernel) for kernel in ("bgmv", "mbgmv")
    )
    beyond = f" from row {decode['flat_rows'] + 1} on" if decode.get("flat_rows") else ""
    lines = [
        caption(
            document,
            f"{settings['model']}, {settings['dtype']}, {settings['threads']} threads, median of "
            f"{settings['rounds'] - 1} rounds, adapters on q, k, v.",
        ),
        "",
        "| | R^2 | held-out error, median | configurations (set aside) |",
        "|---|---|---|---|",
        *(
            f"| {kind} | {figures[f'r2_{kind}']:.4f} | {figures[f'heldout_median_error_{kind}']:.1%} "
            f"| {counts[kind]} ({figures[f'set_aside_{kind}']:.0f}) |"
            for kind in ("decode", "prefill")
        ),
        f"| every other round of the decode steps as the forecast of the rest | {figures['r2_decode_repeats']:.4f} | "
        f"| {counts['decode']} |",
        f"| the same decode model on the paper's grid, which it has not seen | {figures['r2_grid_whole_model']:.4f} | "
        f"| {counts['grid']} |",
        f"| paper's form, BGMV: batch x largest rank | {figures['r2_paper_bgmv']:.4f} | | {bgmv['samples']} |",
        f"| paper's form, MBGMV: sum of ranks | {figures['r2_paper_mbgmv']:.4f} | | {mbgmv['samples']} |",
        "",
        wrapped(
            f"A decode step: {decode['base'] * 1e3:.2f} ms + {decode['per_row'] * 1e6:.0f} us a row{beyond} + "
            f"{decode['per_context'] * 1e9:.0f} ns a token of context + {decode['per_rank'] * 1e6:.2f} us of the "
            f"{TERMS[decode['rank_term']]}. A pass over prompts: {prefill['base'] * 1e3:.2f} ms + "
            f"{prefill['per_token'] * 1e6:.0f} us a token + {prefill['per_token2'] * 1e9:.1f} ns a token squared + "
            f"{prefill['per_token_rank'] * 1e9:.0f} ns a token and rank. Mean held-out error by rank term: "
            + ", ".join(f"{TERMS[term]} {error:.2%}" for term, error in model["heldout_by_term"].items())
            + f". A forecast takes {figures['eval_us']:.1f} us."
        ),
        "",
        probe_text(figures),
        "",
        "![Residuals of both models, and the paper's form on its grid](../images/perfmodel-residuals.svg)",
    ]
    return "\n".join(lines)


def perfmodel_vllm_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    model = _rows(document, "model")[0]
    decode, prefill, errors = model["decode"], model["prefill"], model["errors_by_padded_rank"]
    counts = {kind: len(_rows(document, kind)) for kind in ("decode", "prefill")}
    beyond = f" from row {decode['flat_rows'] + 1} on" if decode.get("flat_rows") else ""
    lines = [
        caption(
            document,
            f"{settings['model']}, {settings['dtype']}, vLLM on a CPU ({model['key']['hardware']}), `max_loras` "
            f"{settings['max_loras']}, `max_lora_rank` {settings['max_lora_rank']}, {figures['rounds']:.1f} repeats, "
            "adapters on q, k, v.",
        ),
        "",
        "| | R^2 | held-out error, median | configurations (set aside) | adapters counted as |",
        "|---|---|---|---|---|",
        *(
            f"| {kind} | {figures[f'r2_{kind}']:.4f} | {figures[f'heldout_median_error_{kind}']:.1%} "
            f"| {counts[kind]} ({figures[f'set_aside_{kind}']:.0f}) | {_counted(fitted)} |"
            for kind, fitted in (("decode", decode), ("prefill", prefill))
        ),
        "",
        wrapped(
            f"A decode step: {decode['base'] * 1e3:.2f} ms + {decode['per_row'] * 1e6:.0f} us a row{beyond} + "
            f"{decode['per_context'] * 1e9:.0f} ns a token of context + {decode['per_rank'] * 1e6:.2f} us of the "
            f"{TERMS[decode['rank_term']]}. A pass over prompts: {prefill['base'] * 1e3:.2f} ms + "
            f"{prefill['per_token'] * 1e6:.0f} us a token + {prefill['per_token2'] * 1e9:.1f} ns a token squared + "
            f"{prefill['per_token_rank'] * 1e9:.0f} ns a token and rank. A load into a slot: "
            f"{figures['load_latency_ms']:.1f} ms, and {figures['load_gb_per_s']:.2f} GB/s. Held-out errors by form, "
            "of decode steps (mean) and of prompts (median): "
            + "; ".join(
                f"{_form(padded)} {errors['decode'][padded]:.1%} and {errors['prefill'][padded]:.1%}"
                for padded in sorted(errors["decode"].keys() & errors["prefill"].keys(), key=int)
            )
            + "."
        ),
        "",
        probe_text(figures),
    ]
    return "\n".join(lines)


def _counted(model: dict[str, Any]) -> str:
    return f"rank {model['padded_rank']}" if model["padded_rank"] else "their own ranks"


def _form(padded: str) -> str:
    return f"with rank {padded} for each adapter" if int(padded) else "with own ranks"


def perfmodel_plot(document: dict[str, Any]) -> Figure:
    """Residuals over the time measured, decode and prefill; the paper's MBGMV line on its grid."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, kind, title in zip(axes, ("decode", "prefill"), ("decode steps", "passes over prompts"), strict=False):
        rows = _rows(document, kind)
        measured = [row["measured_ms"] for row in rows]
        axis.scatter(measured, [100 * (row["forecast_ms"] / row["measured_ms"] - 1) for row in rows], s=6)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(f"{title}: R² {document['figures'][f'r2_{kind}']:.3f}", fontsize=9)
        axis.set_xlabel("measured, ms")
        axis.set_ylabel("forecast - measured, %")
    grid, line = _rows(document, "grid"), next(r for r in _rows(document, "paper") if r["kernel"] == "mbgmv")
    for batch in sorted({row["rows"] for row in grid}):
        of_batch = [row for row in grid if row["rows"] == batch]
        ranks, times = [r["request_ranks"] for r in of_batch], [r["seconds"] * 1e3 for r in of_batch]
        axes[2].scatter(ranks, times, s=8, label=f"batch {batch}")
    ends = [0, max(row["request_ranks"] for row in grid)]
    axes[2].plot(ends, [(line["intercept"] + line["slope"] * end) * 1e3 for end in ends], color="black", linewidth=0.7)
    axes[2].set_title(f"two parameters, on the grid: R² {line['r2']:.3f}", fontsize=9)
    axes[2].set_xlabel("sum of ranks")
    axes[2].set_ylabel("decode step, ms")
    axes[2].legend(frameon=False, fontsize=7)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _rows(document: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if row["kind"] == kind]
