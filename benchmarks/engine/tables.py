"""Tables of the engine in process and of the whole service next to PEFT, one block for each CPU level measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.report import ON_ONE_CORE, caption, probe_text
from benchmarks.common.rule import host, table
from benchmarks.engine.step_profile import KINDS

WORKLOADS = {
    ("base", 1): "base, 1 request",
    ("base", 8): "base, 8 requests",
    ("mixed", 1): "one adapter of rank 64, 1 request",
    ("mixed", 8): "eight adapters of ranks 8-128, 8 requests",
}
STEP_AIM, PREFILL_AIM, FIRST_TOKEN_AIM = 1.3, 1.3, 1.4
"""Decode steps over transformers'; prompts, and a first token, over torch's fp32 products of the same shapes."""


def dtypes(settings: dict[str, Any]) -> str:
    """The engine's, and the peers' where they ran in another one."""
    dtype, peers = settings["dtype"], settings.get("peer_dtype", settings["dtype"])
    return str(dtype) if dtype == peers else f"{dtype} (peers in {peers})"


def with_worst(figures: dict[str, float], name: str, worst: str) -> str:
    """Renders the median of a ratio, with that of the worst round in brackets."""
    return f"{figures[name]:.2f} ({figures[f'{name}_{worst}']:.2f})"


def study_block(document: dict[str, Any], text: str, lines: Sequence[str]) -> str:
    """Renders one CPU level of a study: its host, the caption with `text`, the lines, and the probe of the host."""
    probe = probe_text(document["figures"], ON_ONE_CORE)
    return "\n".join([f"**{host(document)}**", "", caption(document, text), "", *lines, "", probe])


def engine_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    speeds, firsts = [], []
    for (kind, n), title in WORKLOADS.items():
        speeds.append((
            title, f"{figures[f'{kind}_tok_s_{n}']:.0f}", f"{figures[f'peft_{kind}_tok_s_{n}']:.0f}",
            with_worst(figures, f"over_peft_{kind}_{n}", "min"), f"{figures[f'http_{kind}_tok_s_{n}']:.0f}",
        ))  # fmt: skip
        ttft = (f"{figures[f'{prefix}{kind}_ttft_ms_{n}']:.0f} ms" for prefix in ("", "peft_", "http_"))
        firsts.append((title, *ttft))
    text = (
        f"{settings['model']}, {dtypes(settings)}, {settings['threads']} threads for each, "
        f"{settings['prompt_tokens']} prompt and {settings['output_tokens']} output tokens, "
        f"median of {settings['rounds']} alternated rounds."
    )
    return study_block(document, text, [
        *table(("tokens/s", "engine", "PEFT `generate`", "ratio (lowest round)", "service over HTTP"), speeds),
        "",
        *table(("time to first token", "engine", "PEFT `generate`", "service over HTTP"), firsts),
        "",
        *_aim_lines(figures),
        *_step_lines(figures),
    ])  # fmt: skip


def _aim_lines(figures: dict[str, float]) -> list[str]:
    """Renders decode steps next to the peers', and first tokens next to fp32 products; [] for a report without them."""
    if "step_over_peft_base_1" not in figures:
        return []
    rows = [
        (
            f"decode step of {title}: PEFT's over the engine's",
            *_two(figures, f"step_over_peft_{kind}_{n}", "min"),
            _aim(figures[f"step_over_peft_{kind}_{n}"], STEP_AIM, at_least=True),
        )
        for (kind, n), title in WORKLOADS.items()
    ]
    rows += [
        (
            f"{title} over torch's fp32 products",
            *_two(figures, f"{name}_over_products", "max"),
            _aim(figures[f"{name}_over_products"], aim, at_least=False),
        )
        for title, name, aim in (
            ("512 prompt tokens, base, in process:", "prefill_512", PREFILL_AIM),
            ("37 prompt tokens, one adapter, in process:", "first_token_37", FIRST_TOKEN_AIM),
            ("37 prompt tokens, one adapter, over HTTP:", "http_first_token_37", FIRST_TOKEN_AIM),
        )
    ]
    missed = any(cells[-1].endswith("missed") for cells in rows)
    page = "../design/decode-step.md#expected-and-measured"
    why = f"Why an aim is missed: [a decode step on a CPU]({page})."
    return [*table(("", "median of the rounds", "worst round", "aim"), rows), "", *([why, ""] if missed else [])]


def _two(figures: dict[str, float], name: str, worst: str) -> tuple[str, str]:
    return f"{figures[name]:.2f}", f"{figures[f'{name}_{worst}']:.2f}"


def _aim(figure: float, aim: float, *, at_least: bool) -> str:
    met = figure >= aim if at_least else figure <= aim
    return f"{'at least' if at_least else 'at most'} {aim}{'' if met else ': missed'}"


def neighbours_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    text = (
        f"{settings['model']}, {settings['dtype']}, one stream of the base through the whole service, mean time per "
        f"token, median of {settings['rounds']} alternated rounds, the worst round's ratio in brackets."
    )
    rows = [
        (
            f"{title} ({settings[spin]} polls)",
            *(f"{figures[f'{name}_{kind}_ms']:.1f} ms" for kind in ("alone", "busy")),
            with_worst(figures, ratio, "max"),
        )
        for title, name, spin, ratio in (
            ("a node's limit", "limited", "spin", "busy_over_alone"),
            ("OpenMP's default", "default", "default_spin", "default_busy_over_alone"),
        )
    ]
    alone = f"{figures['alone_over_default']:.3f} ({figures['alone_over_default_max']:.3f})"
    return study_block(document, text, [
        *table(("", "alone", "one busy process per core", "ratio"), rows),
        "",
        f"Alone, the limit takes {alone} times as long as the default.",
    ])  # fmt: skip


def _step_lines(figures: dict[str, float]) -> list[str]:
    """A decode step's parts. A kind of operator that the profiler never saw has no column."""
    batches = {"base": "base_8", "eight adapters": "mixed_8"}
    kinds = [
        kind
        for kind in (*KINDS, "other operators")
        if any(_part(figures, batch, kind) >= 0.05 for batch in batches.values())
    ]
    rows = []
    for title, batch in batches.items():
        step, parts = _part(figures, batch, "step"), [_part(figures, batch, kind) for kind in kinds]
        rows.append((title, *(f"{value:.1f} ms" for value in (step, *parts, step - sum(parts)))))
    return [
        "A decode step of 8 requests, timed without the profiler; torch's operators by the profiler:",
        "",
        *table(("", "step", *kinds, "compiled operators, Python"), rows),
    ]


def _part(figures: dict[str, float], batch: str, kind: str) -> float:
    return figures[f"{batch}_{kind.replace(' ', '_')}_ms"]
