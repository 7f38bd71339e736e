"""The tables of docs/results/gpu.md."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from statistics import median
from typing import Any

from benchmarks.common.report import caption, captioned_table
from benchmarks.common.rule import table
from benchmarks.gpu.cold_starts import PLANS

Document = dict[str, Any]
ASKED_ROWS = (1, 8, 32, 64, 128, 256)
LORA_AIM, STEP_SHARE = 1.3, 0.02
SERVED_CONTEXT = 20
"""Tokens: a prompt of 4 and half of an answer of 32"""


def rows_of(document: Document, part: str, key: str) -> list[dict[str, Any]]:
    """Returns the rows of a part that have `key`."""
    return [row for row in document["rows"] if row["part"] == part and key in row]


def gpu_exact_table(document: Document) -> str:
    """Renders the comparison with PEFT and float64."""
    (exact,) = rows_of(document, "exact", "cases")
    half = document["settings"].get("runner") == "lightllm"
    model = "a drawn Llama in fp16, by the runner `lightllm`," if half else "stories260K in fp32"
    text = (
        f"{exact['cases']:,} answers of {model} with drawn adapters ({exact['cold']} of them cold), "
        f"{exact['tokens']:,} tokens: {exact['mismatches']} differ from PEFT's."
    )
    if exact["ties"]:
        text += (
            f" {exact['ties']} answers go on otherwise from a token whose logit lies less than {exact['tie']:g} below "
            "the best one: rounding of the half format."
        )
    checked = rows_of(document, "smoke", "worst_error")
    if checked:
        worst = {
            dtype: max(row["worst_error"] for row in checked if row["dtype"] == dtype)
            for dtype in ("float32", "float16", "bfloat16")
        }
        errors = ", ".join(f"{error:.0e} in {dtype}" for dtype, error in worst.items())
        names = sorted({row["operation"] for row in checked})
        text += f" The worst relative error to float64 of {', '.join(f'`{name}`' for name in names)}: {errors}."
    return caption(document, text)


def gpu_merged_table(document: Document) -> str:
    """Renders the distance of chosen tokens below the best, next to that of PEFT's own choices."""
    (row,) = rows_of(document, "merged", "adapter_peft_below")
    text = (
        "A 7B shape with drawn weights in bf16, three prompts of 12 greedy tokens, against the same weights in fp32: "
        "how far below the best score the worst token lies, in standard deviations of that step's scores."
    )
    cells = [
        (title, f"{row[f'{name}_below']:.3f}", f"{row[f'{name}_peft_below']:.3f}")
        for title, name in (("the base", "base"), ("with an adapter of rank 16", "adapter"))
    ]
    rest = f"Tokens that were chosen without the adapter lie {row['control_below']:.1f} below its best ones."
    head = ("", "engine", "transformers and PEFT")
    return captioned_table(document, text, head, cells, rest)


def gpu_decode_table(document: Document) -> str:
    """Decode steps over the time in which their bytes can be copied."""
    rows = [row for row in rows_of(document, "decode", "served_ms") if row["rows"] in ASKED_ROWS]
    (bandwidth,) = (row["copy_gb_s"] for row in rows_of(document, "decode", "copy_gb_s"))
    floors = served_floors(document)
    text = (
        "Decode steps of the 7B shape in bf16, ms, and in brackets over their floor: the time in which this GPU copies "
        f"as many bytes as the step must read ({bandwidth:,.0f} GB/s, read and written). Alone: from the host's start "
        "to its end, at this context. Served: between tokens of so many requests that run together, of "
        f"{SERVED_CONTEXT} tokens in the mean."
    )
    cells = [
        (
            str(row["rows"]),
            f"{row['context']}: {row['ms']:.1f} ({row['over_floor']:.2f})",
            f"{row['served_ms']:.1f} ({row['served_ms'] / floors[row['rows']]:.2f})",
            f"{1e3 * row['rows'] / row['served_ms']:,.0f}",
        )
        for row in rows
    ]
    head = ("rows", "context: alone", "served", "served tokens/s")
    return captioned_table(document, text, head, cells)


def served_floors(document: Document) -> dict[int, float]:
    """Returns, by rows, the ms in which the bytes of a served step can be copied. The floors of one and of two rows of
    the same context say what the weights take, and what a token's keys and values do."""
    rows = {row["rows"]: row for row in rows_of(document, "decode", "served_ms")}
    context = rows[1]["context"]
    per_token = (rows[2]["floor_ms"] - rows[1]["floor_ms"]) / context
    weights = rows[1]["floor_ms"] - context * per_token
    return {count: weights + count * SERVED_CONTEXT * per_token for count in rows}


def gpu_prefill_table(document: Document) -> str:
    """Prompts as a share of the peak."""
    (peak,) = (row["peak_tflops"] for row in rows_of(document, "prefill", "peak_tflops"))
    text = (
        f"Prompts of one request. Peak: a product of 8,192 x 8,192 drawn numbers in bf16, {peak:.0f} TFLOP/s. The "
        "adapter has rank 64 on q, k and v."
    )
    cells = [
        (
            f"{row['tokens']:,}",
            f"{row['ms']:.1f}",
            f"{row['share_of_peak']:.0%}",
            f"{row['lora_ms']:.1f} ({row['lora_over_base']:.2f}x)",
        )
        for row in rows_of(document, "prefill", "tokens")
    ]
    head = ("tokens", "base, ms", "of the peak", "with the adapter, ms")
    return captioned_table(document, text, head, cells)


def gpu_lora_table(document: Document) -> str:
    """Renders what distinct adapters add to a decode step."""
    rows = rows_of(document, "lora", "over_base")
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    text = (
        "A decode step whose rows have an adapter each, over the same step without adapters. Mixed: ranks 8, 16, 32, "
        "64 and 128 in turn. In brackets: what the adapters add over the time in which their bytes can be copied."
    )
    keys = list(dict.fromkeys((row["targets"], row["adapters"], row["rank"]) for row in rows))
    by_key = {(row["kernel"], row["targets"], row["adapters"], row["rank"]): row for row in rows}
    cells = [
        (
            f"{adapters}, {targets}",
            str(rank),
            *(_added(by_key.get((kernel, targets, adapters, rank))) for kernel in kernels),
        )
        for targets, adapters, rank in keys
    ]
    return captioned_table(document, text, ("adapters", "rank", *kernels), cells)


def _added(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    return f"{row['over_base']:.2f} ({(row['ms'] - row['base_ms']) / row['floor_ms']:.1f})"


def gpu_ttft_table(document: Document) -> str:
    """Cold and warm first tokens at the link's own rate."""
    settings = document["settings"]
    times = {(row["tokens"], row["way"]): row["ms"] for row in document["rows"]}
    text = (
        f"ms to the first token of one call, from the engine's queue to its token; rank {settings['rank']} on q, k, v, "
        f"100 MB in pinned host memory, PCIe as it is. Median of {settings['calls']} calls (worst); cold ways over "
        "`cached`. `full` had 14 CPU workers to choose from."
    )

    def cell(tokens: int, mode: str) -> str:
        times_ms, warm = times[tokens, mode], median(times[tokens, "cached"])
        over = "" if mode == "cached" else f", {median(times_ms) / warm:.2f}x"
        return f"{median(times_ms):.1f} ({max(times_ms):.1f}){over}"

    groups = (("cached",), ("ondmd", "overlap"), ("pipeline",), ("full",))
    cells = [
        (f"{tokens:,}", *("; ".join(cell(tokens, mode) for mode in group) for group in groups))
        for tokens in dict.fromkeys(row["tokens"] for row in document["rows"])
    ]
    head = ("tokens", *(" ; ".join(f"`{mode}`" for mode in group) for group in groups))
    return captioned_table(document, text, head, cells)


COLD_WAYS = ("ondmd", "pipeline", "assist", "full")


def gpu_points_table(document: Document) -> str:
    """Cold starts by link rate, rank and prompt length."""
    text = (
        "ms to the first token, medians of three calls, by the rate to which loads were held, the rank (on q, k, v) "
        "and the prompt's length. Passes are captured; 14 CPU workers."
    )
    cells = [
        (
            "as it is" if row["gb_s"] is None else format(row["gb_s"], "g"),
            str(row["rank"]),
            f"{row['tokens']:,}",
            *_cold_cells(row),
        )
        for row in sorted(rows_of(document, "points", "cached_ms"), key=_point)
    ]
    head = ("GB/s", "rank", "tokens", "`cached`", *(f"`{mode}`" for mode in COLD_WAYS))
    return captioned_table(document, text, head, cells)


def _point(row: dict[str, Any]) -> tuple[float, int, int]:
    return -(row["gb_s"] or 1e9), row["rank"], row["tokens"]


def gpu_regret_text(document: Document) -> str:
    """Renders the planner's regret: its choice over the best plan of each point."""
    rows = rows_of(document, "points", "full_ms")
    lost = [row["full_ms"] / min(row[f"{plan}_ms"] for plan in PLANS) - 1 for row in rows]
    text = (
        f"Over the {len(rows)} points of one call what `full` loses to the best of the plans {_listed(PLANS)} is "
        f"{median(lost):.1%} in the median and {max(lost):.0%} at worst."
    )
    return caption(document, text)


def plan_replay_table(document: Document) -> str:
    """The regret of the planner's first choices, replayed on one GPU report after measurements drawn from the other."""
    rows, figures = rows_of(document, "choices", "planner_regret"), document["figures"]
    text = (
        "Replayed, without a GPU: what the planner's first choices lose to the best plan, and what one plan for "
        f"everything does; median and worst of the points, of each the median of {document['settings']['draws']} draws."
    )
    groups = dict.fromkeys((row["gb_s"], row["loads"] > 1) for row in rows)
    cells = []
    for rate, burst in sorted(groups, key=lambda group: (group[1], group[0] or inf)):
        here = [row for row in rows if (row["gb_s"], row["loads"] > 1) == (rate, burst)]
        loads = sorted({row["loads"] for row in here})
        each = ([row[f"{name}_regret"] for row in here] for name in ("planner", "pipeline", "wait"))
        cells.append(
            (
                "as it is" if rate is None else f"{rate:g}",
                ", ".join(map(str, loads)),
                *(f"{median(lost):.1%}, {max(lost):.0%}" for lost in each),
            )
        )
    rest = (
        f"Of all {len(rows)} points the planner loses {figures['regret_p90']:.1%} at p90 and "
        f"{figures['regret_worst']:.0%} at worst; by the mean of each point's draws "
        f"{figures['regret_mean_p90']:.1%} and {figures['regret_mean_worst']:.0%}; in the worst single draw "
        f"{figures['regret_worst_single_draw']:.0%}. Kinds of calls that were not measured are not among them: without "
        f"workers they lose {figures['unmeasured_regret_worst']:.0%} at worst. With fixed costs, simulated, a node "
        "that has measured its kinds of calls loses at most "
        f"{max(value for name, value in figures.items() if name.startswith('learnt_')):.1%} a call."
    )
    head = ("GB/s", "calls at once", "planner", "always `pipeline`", "always `wait`")
    return captioned_table(document, text, head, cells, rest)


def _listed(names: Sequence[str]) -> str:
    *rest, last = (f"`{name}`" for name in names)
    return f"{', '.join(rest)} and {last}"


def gpu_loads_table(document: Document) -> str:
    """Loads that begin together."""
    text = (
        "Cold calls that come together, each of an adapter of its own: rank 64 on q, k, v, 256 tokens. ms to the first "
        "token, means over the calls, medians of three rounds."
    )
    cells = [
        (str(row["loads"]), "as it is" if row["gb_s"] is None else format(row["gb_s"], "g"), *_cold_cells(row))
        for row in sorted(rows_of(document, "loads", "cached_ms"), key=lambda row: row["loads"])
    ]
    head = ("calls", "GB/s", "`cached`", *(f"`{mode}`" for mode in COLD_WAYS))
    return captioned_table(document, text, head, cells)


def _cold_cells(row: dict[str, Any]) -> tuple[str, ...]:
    warm = row["cached_ms"]
    return f"{warm:.0f}", *(f"{row[f'{mode}_ms']:.0f} ({row[f'{mode}_ms'] / warm:.1f}x)" for mode in COLD_WAYS)


def gpu_kernels_table(document: Document) -> str:
    """Decode kernels by the bytes of their weights, over the copy bandwidth."""
    (copy,) = (row["copy_gb_s"] for row in rows_of(document, "kernels", "copy_gb_s"))
    text = (
        f"LoRA kernels of a decode step (captured, one call), as a share of this GPU's copy bandwidth ({copy:,.0f} "
        "GB/s): adapters' weights of 64 MB and more. Rows, and distinct adapters, of at most 32."
    )
    rows = [row for row in rows_of(document, "kernels", "us") if row["weight_bytes"] >= 64 << 20]
    shapes = {row["shape"]: row["weight_bytes"] for row in rows if row["run"] == "mbgmv"}
    share = {(row["shape"], row["run"]): f"{row['gb_s'] / copy:.0%}" for row in rows}
    runs = ("mbgmv", "bgmv", "torch")
    cells = [(shape, f"{size >> 20}", *(share[shape, run] for run in runs)) for shape, size in shapes.items()]
    return captioned_table(document, text, ("shape", "MB", *runs), cells)


def gpu_service_table(document: Document) -> str:
    """The whole service, called over HTTP."""
    settings = document["settings"]
    rows = [row for row in document["rows"] if row["service"] == "roomy"]
    (start,) = (row for row in rows if row["load"] == "start")
    (first,) = (row for row in rows if row["load"] == "first calls")
    loads = {row["load"]: row for row in rows if "tok_s" in row}
    base, adapters = loads["base"], loads["adapters"]
    text = (
        f"`garnish up` with a base of the {settings['shape']} shape, drawn weights in bf16, and "
        f"{settings['adapters']} adapters of rank "
        f"{settings['rank']} on q, k, v, on one host, over HTTP. Calls one by one have prompts of so many words; "
        f"together, {settings['callers']} callers make {settings['requests']} calls of {settings['load_prompt']} words "
        f"and {settings['load_tokens']} tokens, once."
    )
    cells = [
        ("from `garnish up` to ready, adapters deployed", f"{start['seconds']:.0f} s"),
        (
            f"an adapter's first call, from the registry, {first['words']} words: to the first token",
            f"{median(first['ttft_ms']):.1f} ms ({max(first['ttft_ms']):.1f})",
        ),
        *(
            (
                f"a warm call, {row['words']} words: to the first token",
                f"{median(row['ttft_ms']):.1f} ms ({max(row['ttft_ms']):.1f})",
            )
            for row in rows
            if row["load"] == "one by one"
        ),
        *(
            (
                f"{settings['callers']} callers, {what}",
                f"{row['tok_s']:,.0f} tokens/s; first token {row['ttft_p50_ms']:.0f} ms (p99 {row['ttft_p99_ms']:.0f})",
            )
            for what, row in (("the base", base), ("the adapters in turn", adapters))
        ),
    ]
    return captioned_table(document, text, ("", "median (worst)"), cells)


def gpu_aims_table(document: Document) -> str:
    """Renders aims, results, and worst cases."""
    floors = served_floors(document)
    decode = [row["served_ms"] / floors[row["rows"]] for row in rows_of(document, "decode", "served_ms")]
    added = [
        (row["ms"] - row["base_ms"]) / (LORA_AIM * row["floor_ms"] + STEP_SHARE * row["base_ms"])
        for row in rows_of(document, "lora", "over_base")
        if row["kernel"] == "mbgmv"
    ]
    within = sum(value <= 1 for value in added)
    copy = document["figures"]["copy_gb_s"]
    large = [row for row in rows_of(document, "kernels", "us") if row["weight_bytes"] >= 64 << 20]
    shares = [row["gb_s"] / copy for row in large if row["run"] == "mbgmv"]
    (longest,) = (row for row in rows_of(document, "prefill", "tokens") if row["tokens"] == 2048)
    cells = [
        (
            "a decode step that follows another, over its bytes' floor, at most 1.3",
            f"{sum(value <= 1.3 for value in decode)} of {len(decode)} sizes; {median(decode):.2f} ({max(decode):.2f})",
        ),
        (
            f"what adapters add, at most {LORA_AIM} of their bytes' floor and {STEP_SHARE:.0%} of the step",
            f"{within} of {len(added)} batches; {median(added):.1f} times that ({max(added):.1f})",
        ),
        ("2,048 tokens with rank 64 on q, k, v over the base alone, at most 1.10", f"{longest['lora_over_base']:.2f}"),
        (
            "decode kernels from 64 MB of weights on, at least 80 % of copy bandwidth",
            f"{sum(each >= 0.8 for each in shares)} of {len(shares)} shapes; {median(shares):.0%} ({min(shares):.0%})",
        ),
    ]
    return "\n".join(table(("aim", "median (worst)"), cells))
