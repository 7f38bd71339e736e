"""The tables of docs/design/cold-start.md that come from link_bytes.py's report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.common.report import captioned_table

Row = dict[str, Any]
SHOWN = (16, 64, 128, 256, 512)
"""Tokens; the report has longer prompts too."""


def border_table(document: dict[str, Any]) -> str:
    """Renders the prompt length above which assistance moves more bytes to the device than loading does."""
    rows = _part(document, "border")
    ranks = _distinct(rows, "rank")
    halves = (ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :])
    tokens = {(row["shape"], row["targets"], row["rank"]): row["tokens"] for row in rows}
    lines = [
        (
            f"{shape}, {targets}",
            f"{tokens[shape, targets, ranks[0]] / ranks[0]:.2f}",
            *(", ".join(f"{tokens[shape, targets, rank]:.0f}" for rank in half) for half in halves),
        )
        for shape in _distinct(rows, "shape")
        for targets in _distinct(rows, "targets")
    ]
    head = ("base, adapted", "tokens a rank", *(f"rank {', '.join(map(str, half))}" for half in halves))
    return captioned_table(document, "Computed.", head, lines)


def link_table(document: dict[str, Any]) -> str:
    """The ideal gain by link and rank."""
    rows, links = _part(document, "links"), document["settings"]["links"]
    ranks = _distinct(rows, "rank")
    gains = {(row["link"], row["targets"], row["rank"], row["tokens"]): row["gain"] for row in rows}
    text = (
        "Computed, for the 7B shape with the layer times of an H100: the percentage of the time to the first token "
        "that the best choice of assisted layers saves against the pipeline alone, for prompts of "
        f"{', '.join(map(str, SHOWN[:-1]))} and {SHOWN[-1]} tokens."
    )
    lines = [
        (
            f"{link}, {rate / 1e9:g} GB/s; {targets}",
            *(", ".join(f"{gains[link, targets, rank, tokens] * 100:.0f}" for tokens in SHOWN) for rank in ranks),
        )
        for link, rate in links.items()
        for targets in _distinct(rows, "targets")
    ]
    max_gain = document["figures"]["most_gain_from_512"]
    rest = f"From 512 tokens on nothing saves more than {max_gain * 100:.1f} %."
    head = ("link, adapted", *(f"rank {rank}" for rank in ranks))
    return captioned_table(document, text, head, lines, rest)


def bound_table(document: dict[str, Any]) -> str:
    """The least that FULL can take over CACHED in the settings of coldstart.py."""
    text = "Computed, for SmolLM2-135M: the time to the first token over that of a warm call, at best."
    lines = [
        (
            f"{row['ratio']:g}",
            f"{row['setting']} (rank {row['rank']}), {row['tokens']} tokens",
            f"{row['pipeline_over_cached']:.2f}",
            f"{row['full_over_cached']:.2f}",
            f"{row['group']}",
        )
        for row in _part(document, "settings")
    ]
    head = ("load : prefill", "call", "`pipeline`", "`full`", "layers assisted")
    return captioned_table(document, text, head, lines)


def _part(document: dict[str, Any], part: str) -> list[Row]:
    return [row for row in document["rows"] if row["part"] == part]


def _distinct(rows: Iterable[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))
