"""The rule by which README and docs state figures."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.report import LEVEL_NAMES, load, machine
from benchmarks.common.rule import WIDTH, host, spread, table, wrapped
from kernels.level import level_of

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)
WORD = st.text(st.characters(categories=("L", "Nd")), min_size=1, max_size=12)
AVX512 = "avx2 fma f16c bmi2 avx512f avx512bw avx512vl avx512dq"
WORDS = st.lists(WORD | st.tuples(st.sampled_from("+-*"), WORD).map(" ".join), max_size=60)
"""Among them terms of a sum: a sign and a word."""


@given(NUMBERS, st.booleans())
def test_spread_counts_every_setting(values: list[float], lower: bool) -> None:
    found = spread(iter(values), lower_is_better=lower)
    assert (found.median, found.count) == (statistics.median(values), len(values))
    assert all(found.worst >= value if lower else found.worst <= value for value in values)
    assert found.worst in values


def test_spread_of_nothing() -> None:
    with pytest.raises(statistics.StatisticsError):
        spread([], lower_is_better=True)


@given(WORDS, st.sampled_from(["", "  "]))
def test_wrapped_keeps_the_words(words: list[str], indent: str) -> None:
    text = " ".join(["first", *words])
    lines = wrapped(text, indent).split("\n")
    assert " ".join(lines).split() == text.split()
    assert all(len(line) <= WIDTH for line in lines)
    assert all(line.startswith(indent) and line.strip()[0] not in "+-*" for line in lines[1:])


def test_table() -> None:
    assert table(("", "a"), [("x", "1"), ("y", "")]) == ["| | a |", "|---|---|", "| x | 1 |", "| y | |"]


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("sse2 avx2 fma f16c", "below AVX2"),
        ("avx2 fma f16c bmi2", "AVX2"),
        ("avx2 fma f16c bmi2 avx512f", "AVX2"),
        (AVX512, "AVX512"),
        (f"{AVX512} amx_bf16 amx_tile", "AVX512"),
        (f"{AVX512} avx512_bf16", "AVX512-BF16"),
        (f"{AVX512} avx512_bf16 amx_bf16 amx_tile", "AMX"),
    ],
)
def test_cpu_level(flags: str, level: str) -> None:
    assert LEVEL_NAMES[level_of(f"processor : 0\nflags\t\t: fpu {flags}\n\nprocessor : 1\nflags\t\t: fpu\n")] == level


def test_host_names_the_level() -> None:
    """Of the settings, where a study was held to one; else the machine's; older reports have none."""
    document: dict[str, Any] = {"machine": {"cpu": "X", "cores": 2}, "settings": {}}
    assert host(document) == "2 cores of X (level not recorded)"
    document["machine"] |= {"level": "AMX", "cores": 1}
    assert host(document) == "1 core of X (AMX)"
    document["settings"]["level"] = "AVX2"
    assert host(document) == "1 core of X (AVX2)"
    assert host({"machine": machine(), "settings": {}}).endswith(f"({machine()['level']})")
    assert load("engine")["machine"]["cpu"] in host(load("engine"))
