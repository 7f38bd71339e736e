"""Tables of the engines study, for docs/results/benchmarks.md and docs/operate/engines.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common.report import captioned_table, origin, probe_text
from benchmarks.common.rule import table, wrapped
from benchmarks.engines.figures import ADDED_TTFT_AIM_MS, RATIO_AIMS, key
from benchmarks.engines.servers import TITLES
from benchmarks.engines.turns import ADAPTERS, BASE

Figures = dict[str, float]


def speed_table(document: dict[str, Any]) -> str:
    """Renders tokens/s, first tokens, and what the node costs over vLLM's own server."""
    settings, figures = document["settings"], document["figures"]
    loads = load_titles(settings)
    ranks, slots = ", ".join(map(str, settings["ranks"])), settings["arguments"]
    text = (
        f"{settings['model']}, {settings['dtype']}, vLLM {settings['vllm']['vllm']} with {slots['max_loras']} slots of "
        f"rank {slots['max_lora_rank']}, adapters of ranks {ranks} on {settings['targets']}, "
        f"{settings['prompt_words']} prompt words, {settings['tokens']} output tokens; median of "
        f"{settings['rounds']} alternated rounds. {_pinned(settings)}"
    )
    speeds = [(title, *_cells(figures, "tok_s", name)) for name, title in loads.items()]
    firsts = [(title, *_first_cells(figures, name)) for name, title in loads.items()]
    head = tuple(TITLES.values())
    return "\n".join([
        captioned_table(document, text, ("tokens/s", *head), speeds),
        "",
        *table(("first token (longest)", *head), firsts),
        "",
        wrapped(
            "What a node adds to vLLM: `engine: vllm` next to vLLM's own server, by the rounds of both, with 95 % "
            "intervals."
        ),
        "",
        *table(("", "tokens/s, ratio", "worst round", "aim"), _ratio_rows(figures, loads)),
        "",
        *table(("", "first token, added", "worst round", "aim"), _added_rows(figures, loads)),
        "",
        wrapped(_engines_text(figures, loads)),
        "",
        probe_text(settings),
    ])  # fmt: skip


def start_table(document: dict[str, Any]) -> str:
    """Renders starts, memory and cold calls."""
    figures, settings = document["figures"], document["settings"]
    rows = [
        (
            f"start with {settings['warm']} adapters (longest of {settings['starts']})",
            *(_seconds(figures, f"start_s_{server}", f"start_s_max_{server}") for server in TITLES),
        ),
        ("host memory, all processes", *(_gib(figures, f"memory_bytes_{server}") for server in TITLES)),
    ]
    if any(f"device_bytes_{server}" in figures for server in TITLES):
        rows.append(("memory of the GPU", *(_gib(figures, f"device_bytes_{server}") for server in TITLES)))
    rows += [
        ("first token of an adapter's first call (longest)", *(_cold(figures, "first", server) for server in TITLES)),
        ("the same, adapter in host memory (longest)", *(_cold(figures, "host", server) for server in TITLES)),
    ]
    text = f"{settings['model']}, vLLM {settings['vllm']['vllm']}."
    return "\n".join([wrapped(f"{text} {origin(document)}"), "", *table(("", *TITLES.values()), rows)])


def load_titles(settings: dict[str, Any]) -> dict[str, str]:
    """Returns the title of each timed load, by its key in the figures."""
    warm = settings["warm"]
    titles = {key(BASE, 1): "base, 1 caller", key(ADAPTERS, 1): f"{warm} adapters in turn, 1 caller"}
    for count in settings["callers"]:
        titles |= {
            key(BASE, count): f"base, {count} callers",
            key(ADAPTERS, count): f"{warm} adapters, {count} callers",
        }
    return titles


def _pinned(settings: dict[str, Any]) -> str:
    if not settings["pinned"]:
        return "Nothing is pinned."
    return (
        "The processes that compute (our engine; vLLM's engine core and worker) have one core and one thread; all "
        "others and the client have another core."
    )


def _cells(figures: Figures, figure: str, name: str) -> Sequence[str]:
    return [_number(figures.get(f"{figure}_{server}_{name}")) for server in TITLES]


def _first_cells(figures: Figures, name: str) -> Sequence[str]:
    return [_milliseconds(figures, f"ttft_ms_{server}_{name}", f"ttft_ms_max_{server}_{name}") for server in TITLES]


def _ratio_rows(figures: Figures, loads: dict[str, str]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name, title in loads.items():
        figure = f"ratio_{name}"
        if figure in figures:
            aim = next((aim for count, aim in RATIO_AIMS.items() if name == key(ADAPTERS, count)), None)
            missed = aim is not None and figures[figure] < aim
            cell = "" if aim is None else f"at least {aim:.2f}{': missed' if missed else ''}"
            rows.append((title, _interval(figures, figure, ".3f"), f"{figures[f'{figure}_min']:.3f}", cell))
    return rows


def _added_rows(figures: Figures, loads: dict[str, str]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for name, title in loads.items():
        figure = f"added_ttft_ms_{name}"
        if figure in figures:
            aimed = name == key(ADAPTERS, 1)
            missed = aimed and figures[figure] > ADDED_TTFT_AIM_MS
            cell = f"at most {ADDED_TTFT_AIM_MS:.0f} ms{': missed' if missed else ''}" if aimed else ""
            rows.append((title, f"{_interval(figures, figure, '.1f')} ms", f"{figures[f'{figure}_max']:.1f} ms", cell))
    return rows


def _engines_text(figures: Figures, loads: dict[str, str]) -> str:
    parts = [
        f"{title}: {_interval(figures, f'engines_{name}', '.2f')} times"
        for name, title in loads.items()
        if f"engines_{name}" in figures
    ]
    return f"Tokens/s of `engine: garnish` over those of `engine: vllm`: {'; '.join(parts)}." if parts else ""


def _interval(figures: Figures, figure: str, form: str) -> str:
    middle, lower, upper = (format(figures[f"{figure}{end}"], form) for end in ("", "_lower", "_upper"))
    return f"{middle} ({lower} to {upper})"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}"


def _seconds(figures: Figures, figure: str, worst: str) -> str:
    return f"{figures[figure]:.1f} s ({figures[worst]:.1f} s)" if figure in figures else "not measured"


def _milliseconds(figures: Figures, figure: str, worst: str) -> str:
    return f"{figures[figure]:.0f} ms ({figures[worst]:.0f} ms)" if figure in figures else "not measured"


def _cold(figures: Figures, kind: str, server: str) -> str:
    figure = f"{kind}_ttft_ms_{server}"
    return _milliseconds(figures, figure, f"{figure}_max")


def _gib(figures: Figures, figure: str) -> str:
    return f"{figures[figure] / (1 << 30):.2f} GiB" if figure in figures else "not measured"
