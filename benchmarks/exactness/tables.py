"""The tables of docs/results/benchmarks.md on exactness and rounding."""

from __future__ import annotations

from typing import Any

from benchmarks.common.report import captioned_table

ROUNDED = {"PEFT": "PEFT in {}", "alone": "engine in {}, one by one", "company": "engine in {}, 16 at a time"}


def exactness_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    text = f"{settings['model']} and a drawn Llama, {settings['adapters']} drawn adapters each."
    columns = ("cases", "tokens", "mismatches", "ties")
    cells = [(row["part"], *(str(row[name]) for name in columns)) for row in document["rows"]]
    rest = (
        f"{figures['cold']} cases found their adapter on its way. Their chunks: {figures['chunks_wait']} waited, "
        f"{figures['chunks_pipeline']} were pipelined, {figures['chunks_assist']} assisted; {figures['layers_cpu']} "
        f"layers were computed by CPU workers, {figures['layers_device']} on the device before the adapter was whole. "
        f"{figures['workers_killed']} times a worker was killed and {figures['workers_stopped']} times stopped; "
        f"{figures['replays']} chunks and steps were computed again. {figures['rows_joined']} rows decoded before "
        f"their adapter was there. {figures['cached_tokens']} tokens of prompts were not computed, as an earlier "
        "request had left them."
    )
    head = ("part", "cases", "tokens compared", "mismatches", "excused ties")
    return captioned_table(document, text, head, cells, rest)


def rounding_table(document: dict[str, Any]) -> str:
    figures, settings = document["figures"], document["settings"]
    text = (
        f"{settings['model']}, {settings['adapters']} adapters of ranks {settings['ranks']}, {settings['answers']} "
        f"answers of {settings['tokens']} tokens to prompts of {settings['prompt_tokens']} tokens."
    )
    lines = [
        (
            ROUNDED[row["of"]].format(settings["dtype"]), f"{row['tokens']:,}", f"{row['median']:.3f}",
            f"{row['p99']:.2f}", f"{row['most']:.2f}", f"{row['flips'] / row['tokens']:.1%}", f"{row['flip_gap']:.2f}",
        )
        for row in document["rows"]
    ]  # fmt: skip
    head = ("", "tokens", "error, median", "p99", "worst", "another likeliest", "widest gap of these")
    rest = (
        f"{figures['texts_apart']:.0f} texts differ between the engine's two ways, all from a token on whose two best "
        f"log probabilities lie at most {figures['apart_gap']:.3g} apart."
    )
    return captioned_table(document, text, head, lines, rest)
