"""The study of the prefix cache: what it compares, and that what it asks twice is found once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from studies import run_study

from benchmarks.prefix_cache.prefix_cache import figures_of, ratios
from benchmarks.prefix_cache.tables import prefix_cache_table


def row(way: str, part: str, time: float, number: int = 0, model: str = "m", **more: Any) -> dict[str, Any]:
    return {"way": way, "part": part, "round": number, "model": model, "ttft_p50_ms": time, **more}


def test_ratios_are_of_the_same_round_model_and_length() -> None:
    rows = [row("off", "later", 10.0, words=8), row("auto", "later", 5.0, words=8)]
    rows += [row("auto", "later", 2.0, 1, words=8), row("off", "later", 8.0, 1, words=8)]
    rows += [row("off", "later", 30.0, model="a0", words=9), row("auto", "later", 60.0, model="a0", words=9)]
    assert ratios(rows, lambda each: each["ttft_p50_ms"]) == {"later_w8": [0.5, 0.25], "later_w9": [2.0]}
    figures = figures_of(rows, 3)
    assert (figures["over_later_w8"], figures["over_later_w8_max"]) == (0.375, 0.5)
    assert figures["over_later_w9"] == 2.0 and figures["texts_apart"] == 3


def test_a_crowd_counts_by_its_last_ones_and_its_rate() -> None:
    rows = [
        row(way, "crowd", 1.0, number, ttft_p90_ms=time, tok_s=rate)
        for number in (0, 1)
        for way, time, rate in (("off", 10.0, 5.0), ("auto", 4.0 + number, 10.0 - number))
    ]
    figures = figures_of(rows, 0)
    assert (figures["over_crowd"], figures["over_crowd_max"]) == (0.45, 0.5)
    assert (figures["tok_s_over_crowd"], figures["tok_s_over_crowd_min"]) == (1.9, 1.8)


def test_study(monkeypatch: pytest.MonkeyPatch, stories_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prefix.json"
    arguments = ["--quick", "--model", str(stories_dir), "--dtype", "float32", "--json", str(file)]
    run_study(monkeypatch, "prefix_cache.prefix_cache", *arguments)
    document = json.loads(file.read_text())
    for each in document["rows"]:
        shares = each["part"] in ("later", "turn", "crowd")
        assert (each["cached"] > 0) == (shares and each["way"] == "auto"), each
    assert document["figures"]["texts_apart"] == 0
    text = prefix_cache_table(document)
    assert all(part in text for part in ("asked about again", "a further turn of a chat", "nothing in common"))
