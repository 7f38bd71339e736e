"""The table of what the prefix cache brings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common.report import captioned_table, probe_text

Row = dict[str, Any]
PARTS = {
    "first": "a text of {} words, asked about first", "later": "asked about again", "turn": "a further turn of a chat",
    "crowd": "eight callers ask about one text: p90", "apart": "eight callers, nothing in common",
}  # fmt: skip


def prefix_cache_table(document: Row) -> str:
    """Times to the first token, and tokens/s of calls that came together, with and without."""
    settings, rows, figures = document["settings"], document["rows"], document["figures"]
    text = (
        f"{settings['model']}, {settings['dtype']}, the base and an adapter of rank {settings['rank']} in turn, "
        f"answers of {settings['tokens']} tokens, {settings['rounds']} rounds."
    )
    cases = [("first", words) for words in settings["lengths"]] + [("later", words) for words in settings["lengths"]]
    cases += [("turn", None), ("crowd", None), ("apart", None)]
    cells = [_cells(part, words, rows, figures) for part, words in cases]
    head = ("to the first token", "tokens left by others", "off", "auto", "auto over off (worst round)")
    rest = (
        f"Tokens/s, auto over off: callers of one text {figures['tok_s_over_crowd']:.2f} (worst "
        f"{figures['tok_s_over_crowd_min']:.2f}), nothing in common {figures['tok_s_over_apart']:.2f} (worst "
        f"{figures['tok_s_over_apart_min']:.2f}). {figures['texts_apart']:.0f} answers are not the same with and "
        f"without. {probe_text(settings)}"
    )
    return captioned_table(document, text, head, cells, rest)


def _cells(part: str, words: int | None, rows: Sequence[Row], figures: dict[str, float]) -> tuple[str, ...]:
    here = [row for row in rows if row["part"] == part and row.get("words") == words]
    kind = "ttft_p90_ms" if part == "crowd" else "ttft_p50_ms"
    times = {mode: median(row[kind] for row in here if row["way"] == mode) for mode in ("off", "auto")}
    cached = [row for row in here if row["way"] == "auto"]
    share = sum(row["cached"] for row in cached) / sum(row["prompt_tokens"] for row in cached)
    name = part if words is None else f"{part}_w{words}"
    title = PARTS[part].format(words) if part != "later" else f"a text of {words} words, {PARTS[part]}"
    ratio = f"{figures[f'over_{name}']:.2f} ({figures[f'over_{name}_max']:.2f})"
    return title, f"{share:.0%}", f"{times['off']:.0f} ms", f"{times['auto']:.0f} ms", ratio
