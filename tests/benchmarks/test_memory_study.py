"""The books of the compared allocators are right, and the study writes a whole report."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.adapter_memory.allocators import BestFit, Shape
from benchmarks.adapter_memory.memory import ALL, ATTENTION, BASES, RANKS, makers
from benchmarks.common.trace import draw_calls, minute_counts
from tests.benchmarks.studies import run_study
from tests.support.draws import draws

ROOT = Path(__file__).parents[2]
BASE = BASES["llama-7b"]
POOL = 2 << 30


@settings(max_examples=draws(20))
@given(data=st.data(), kind=st.sampled_from(["pages", "slots", "bestfit", "slora"]))
def test_books(data: st.DataObject, kind: str) -> None:
    """Nothing is taken beyond the pool, an adapter takes at least its bytes, and at the end all is free again."""
    allocator = makers(POOL, BASE, "mixed")[kind]()
    shapes = st.builds(Shape, st.just(BASE), st.sampled_from(RANKS), st.sampled_from([ATTENTION, ALL]))
    held: dict[int, Shape] = {}
    for name, shape in enumerate(data.draw(st.lists(shapes, max_size=25))):
        before = allocator.used
        if allocator.place(name, shape):
            held[name] = shape
            assert allocator.used - before >= shape.live
        else:
            assert allocator.used == before
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            del held[gone]
            allocator.remove(gone)
        live = sum(s.live for s in held.values())
        assert live <= allocator.used <= POOL - allocator.unusable()
        if isinstance(allocator, BestFit):
            spans = sorted([*allocator._gaps, *allocator._placed.values()])
            assert all(sum(a) == b[0] for a, b in pairwise(spans))
            assert spans[0][0] == 0 and sum(spans[-1]) == POOL
    for name in held:
        allocator.remove(name)
    assert allocator.used == 0
    largest = Shape(BASE, max(RANKS), ALL)
    assert allocator.place(99, largest)


def test_calls_follow_the_trace() -> None:
    counts = minute_counts(without_top=10)
    assert counts.shape == (375, 480)
    calls = draw_calls(counts, 20_000, np.random.default_rng(1))
    share = np.bincount(calls, minlength=375) / 20_000
    assert np.abs(share - counts.sum(axis=1) / counts.sum()).max() < 0.02
    assert (draw_calls(counts, 20_000, np.random.default_rng(1)) == calls).all()


@pytest.mark.parametrize("seed", [3])
def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    file = tmp_path / "report.json"
    run_study(monkeypatch, "adapter_memory.memory", "--quick", "--seed", str(seed), "--json", str(file))
    figures = json.loads(file.read_text())["figures"]
    assert figures["utilisation"] > 0.97
    assert figures["fragmentation"] < 0.02
    for other in ("slots", "bestfit", "slora"):
        assert figures[f"{other}_utilisation"] < figures["utilisation"]
