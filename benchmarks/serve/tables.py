"""The table of the serving study, for docs/results/benchmarks.md."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import caption
from benchmarks.common.rule import host, table, wrapped
from benchmarks.engine.tables import dtypes, study_block, with_worst


def serve_table(document: dict[str, Any]) -> str:
    settings = document["settings"]
    text = (
        f"{dtypes(settings)}, {settings['threads']} threads for each, {settings['concurrency']} requests at once, "
        f"{settings['prompt_tokens']} prompt and {settings['output_tokens']} output tokens, median of "
        f"{settings['rounds']} alternated rounds, the worst round in brackets."
    )
    speeds, steps = [], []
    for name, title in settings["models"].items():
        of = {key.removesuffix(f"_{name}"): value for key, value in document["figures"].items() if key.endswith(name)}
        speeds.append((
            title, f"{of['base_tok_s']:.0f}", f"{of['mixed_tok_s']:.0f}",
            *(with_worst(of, figure, "min") for figure in ("over_peft_static_base", "over_peft")),
        ))  # fmt: skip
        base, mixed, padded = (f"{of[f'{kind}_step_ms']:.1f} ms" for kind in ("base", "mixed", "padded"))
        steps.append((
            title, base, f"{mixed}, {with_worst(of, 'added_step_over_floor', 'max')}",
            padded, with_worst(of, "padded_over_mixed_step", "min"),
        ))  # fmt: skip
    return study_block(document, text, [
        *table(("tokens/s", "base", "eight adapters", "over PEFT: base", "adapters"), speeds),
        "",
        *table(("median step", "base", "eight adapters, added / floor", "padded", "padded / adapters"), steps),
        "",
        _over_http(document),
    ])  # fmt: skip


def _over_http(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    return wrapped(
        f"Over HTTP ({settings['models']['smollm2']}, the client on the same cores): "
        f"{figures['http_base_tok_s']:.0f} tokens/s for the base and {figures['http_mixed_tok_s']:.0f} for eight "
        f"adapters. Open loop, {figures['open_rate']:.2f} requests/s: TTFT p50 {figures['open_ttft_p50_ms']:.0f} ms "
        f"and p99 {figures['open_ttft_p99_ms']:.0f} ms, TPOT p50 {figures['open_tpot_p50_ms']:.0f} ms, E2E p50 "
        f"{figures['open_e2e_p50_ms']:.0f} ms, sends late by {figures['open_late_max_ms']:.1f} ms at most. The gateway "
        f"adds {figures['gateway_added_p50_ms']:.1f} ms to the median TTFT of {settings['pairs']} short requests, each "
        "sent through it and straight to the node."
    )


VERSION_FIGURES = {
    "ttft_1_s": ("TTFT, one call", 1e3, "ms"),
    "tok_s_1": ("tokens/s, one call", 1, ""),
    "ttft_8_s": ("median TTFT, eight calls at once", 1e3, "ms"),
    "tok_s_8": ("tokens/s, eight calls at once", 1, ""),
}


def versions_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    text = (
        f"Two services of default settings, commit {settings['before']} and the later one, called in turn over HTTP "
        f"in {settings['rounds']} alternated rounds: SmolLM2 135M, {settings['prompt_tokens']} prompt and "
        f"{settings['tokens']} output tokens, sampled. Medians, the worst round in brackets; the ratio is the median "
        "of the rounds' own, with its 95 % interval."
    )
    rows = []
    for name, (title, scale, unit) in VERSION_FIGURES.items():
        values = []
        for version in ("before", "after"):
            middle, worst = figures[f"{name}_{version}"], figures[f"{name}_{version}_worst"]
            values.append(f"{scale * middle:.0f} ({scale * worst:.0f}) {unit}".strip())
        low, high = figures[f"{name}_ratio_lower"], figures[f"{name}_ratio_upper"]
        rows.append((title, *values, f"{figures[f'{name}_ratio']:.2f} ({low:.2f} to {high:.2f})"))
    head = ("", "before", "after", "after / before")
    return "\n".join([f"**{host(document)}**", "", caption(document, text), "", *table(head, rows)])


def relay_cost_text(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    return wrapped(
        f"A gateway worker's CPU time for each token that it relays ({settings['streams']} streams of "
        f"{settings['rate']:.0f} tokens/s, commit {settings['before']} and the later one in {settings['rounds']} "
        f"alternated rounds, on {host(document)}): {figures['before_us_per_token']:.1f} us before, "
        f"{figures['after_us_per_token']:.1f} us after; ratio {figures['ratio']:.2f} "
        f"({figures['ratio_lower']:.2f} to {figures['ratio_upper']:.2f}). The aim was 25 us."
    )
