"""The compiled CPU operator against float64; equal bits whatever threads and neighbours a token has."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.build import CompileError, load_library
from kernels.compiled import COLUMNS, CompiledGroup, Segments, load_operators
from kernels.view import KernelArgumentError
from tests.support.kernel_cases import POPULARITY, Case, draw_case, draw_slots, relative_error

OPERATORS = load_operators()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def run(case: Case, threads: int = 1, poison: float = torch.nan) -> list[torch.Tensor]:
    tokens, d_in = case.x.shape
    widths = [y.shape[1] for y in case.ys]
    ys = case.fresh()
    segments = Segments(case.seg_start, case.seg_slot, tokens, max(case.ranks), d_in, threads)
    segments.scratch.fill_(poison)
    CompiledGroup(OPERATORS, case.view, d_in, widths).add(ys, case.x, segments)
    return ys


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first, second, strict=True))


@given(data=st.data())
def test_drawn(data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=4))
    slot = st.integers(-1, len(ranks) - 1)
    case = draw_case(
        ranks,
        data.draw(st.lists(st.tuples(slot, st.integers(0, 9)), min_size=1, max_size=6)),
        data.draw(st.integers(1, 200)),
        data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3)),
        data.draw(st.sampled_from(list(TOLERANCE))),
        seed=data.draw(st.integers(0, 1000)),
        scattered=data.draw(st.booleans()),
    )
    ys = run(case)
    assert relative_error(ys, case) <= TOLERANCE[case.x.dtype]
    assert same(ys, run(case, threads=2, poison=torch.inf))


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_popularity(popularity: str, dtype: torch.dtype) -> None:
    """At SmolLM2's widths: large enough that several threads share the work."""
    ranks = [8, 16, 32, 64, 128]
    slots = draw_slots(popularity, 8, len(ranks), torch.Generator().manual_seed(3))
    case = draw_case(ranks, [(-1, 2), *((slot, 1) for slot in slots)], 576, [576, 192, 192], dtype)
    ys = run(case)
    assert relative_error(ys, case) <= TOLERANCE[dtype]
    for threads in (2, 3, 7):
        assert same(ys, run(case, threads))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    case = draw_case([24, 9], [(1, 3), (0, 7), (-1, 1)], 130, [130, 70], dtype)
    together = run(case)
    for token in range(10):
        alone = [y[token : token + 1] for y in case.fresh()]
        group = CompiledGroup(OPERATORS, case.view, 130, [130, 70])
        seg_start = torch.tensor([0, 1], dtype=torch.int32)
        segments = Segments(seg_start, case.token_slot[token : token + 1], 1, 24, 130, threads=1)
        group.add(alone, case.x[token : token + 1], segments)
        assert same(alone, [y[token : token + 1] for y in together])


@given(data=st.data())
def test_two_steps_in_parts_have_the_bits_of_one(data: st.DataObject) -> None:
    """Any rows of A at a time, then any columns of B, of two segments one after the other."""
    ranks = data.draw(st.lists(st.integers(0, 140), min_size=2, max_size=2))
    widths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    lengths, dtype = (
        data.draw(st.tuples(st.integers(1, 9), st.integers(1, 9))),
        data.draw(st.sampled_from([*TOLERANCE])),
    )
    case = draw_case(ranks, [(0, lengths[0]), (1, lengths[1])], data.draw(st.integers(1, 200)), widths, dtype)
    ys, capacity = case.fresh(), max(ranks)
    group = CompiledGroup(OPERATORS, case.view, case.x.shape[1], widths)
    for slot, (begin, end) in enumerate([(0, lengths[0]), (lengths[0], sum(lengths))]):
        start, slots = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([slot], dtype=torch.int32)
        segments = Segments(start, slots, end - begin, capacity, case.x.shape[1], 1)
        xa = torch.full((end - begin, len(widths), capacity), torch.nan)
        for low, high in pieces(data, [*range(len(widths) * ranks[slot])], len(widths) * ranks[slot]):
            group.shrink(xa, case.x[begin:end], segments, low, high)
        assert bool(xa[:, :, ranks[slot] :].isnan().all()) and not bool(xa[:, :, : ranks[slot]].isnan().any())
        borders = [sum(widths[:p]) + column for p, width in enumerate(widths) for column in range(0, width, COLUMNS)]
        for low, high in pieces(data, borders, sum(widths)):
            group.expand([y[begin:end] for y in ys], xa, segments, low, high)
    assert same(ys, run(case))


def pieces(data: st.DataObject, borders: list[int], size: int) -> list[tuple[int, int]]:
    """0 to `size`, cut at some of the borders; in a drawn order."""
    some = data.draw(st.lists(st.sampled_from(borders or [0]), max_size=4))
    found: list[tuple[int, int]] = data.draw(st.permutations([*itertools.pairwise(sorted({0, size, *some}))]))
    return found


@pytest.mark.parametrize("rank", [1, 511, 512])
def test_extreme_ranks(rank: int) -> None:
    case = draw_case([rank], [(0, 1)], 40, [24], torch.float32)
    assert relative_error(run(case), case) <= 1e-5


def test_nan_in_one_adapter_stays_in_its_rows() -> None:
    case = draw_case([5, 20], [(0, 2), (1, 2)], 64, [96], torch.float32)
    clean = run(case)[0]
    case.view.pool[int(case.view.row_offset[case.view.first[1, 0, 0]]) * case.view.unit] = torch.nan
    found = run(case)[0]
    assert bool(found[2:].isnan().all())
    assert torch.equal(found[:2], clean[:2])


def test_refuses_what_it_cannot_take() -> None:
    case = draw_case([5], [(0, 2)], 40, [24], torch.float32)
    group = CompiledGroup(OPERATORS, case.view, 40, [24])
    segments = Segments(case.seg_start, case.seg_slot, 2, 5, 40, 1)
    ys = case.fresh()
    with pytest.raises(KernelArgumentError, match=r"x is torch\.bfloat16"):
        group.add(ys, case.x.bfloat16(), segments)
    with pytest.raises(KernelArgumentError, match=r"ys\[0\] is torch\.float32 \(2, 25\)"):
        group.add([torch.zeros(2, 25)], case.x, segments)
    with pytest.raises(KernelArgumentError, match=r"seg_start is torch\.int64 \(2,\); i32\[2\] is needed"):
        Segments(case.seg_start.long(), case.seg_slot, 2, 5, 40, 1)
    with pytest.raises(KernelArgumentError, match=r"\[3, 40\] is needed"):
        group.add(ys, case.x, Segments(case.seg_start, case.seg_slot, 3, 5, 40, 1))
    with pytest.raises(KernelArgumentError, match="widths up to 39, not 40"):
        group.add(ys, case.x, Segments(case.seg_start, case.seg_slot, 2, 5, 39, 1))
    with pytest.raises(KernelArgumentError, match="takes fp32, bf16 and fp16"):
        CompiledGroup(OPERATORS, replace(case.view, pool=case.view.pool.double()), 40, [24])
    two = Segments(case.seg_start, case.seg_slot, 2, 5, 40, 1)
    for xa in (torch.zeros(2, 1, 4), torch.zeros(2, 1, 5).double(), torch.zeros(2, 1, 10)[:, :, ::2]):
        with pytest.raises(KernelArgumentError, match=r"contiguous fp32 \[2, 1, 5\] is needed"):
            group.shrink(xa, case.x, two, 0, 5)
    assert torch.equal(ys[0], case.ys[0])


def test_built_once_by_processes_that_come_together(tmp_path: Path) -> None:
    """By a compiler that does not optimise: that takes a quarter of the time."""
    found, hasty = shutil.which("g++"), tmp_path / "bin" / "g++"
    if found is None:
        pytest.skip("NOT RUN: there is no g++ here")
    hasty.parent.mkdir()
    hasty.write_text(f'#!/bin/sh\nexec {found} "$@" -O0\n')
    hasty.chmod(0o755)
    environment = os.environ | {"PATH": str(hasty.parent) + os.pathsep + os.environ["PATH"]}
    command = "import sys, torch, pathlib, kernels.build as b; b.load_library(pathlib.Path(sys.argv[1]))"
    root = Path(__file__).parents[2]
    arguments = [sys.executable, "-c", command, str(tmp_path / "cache")]
    started = [
        subprocess.Popen(arguments, cwd=root, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in started:
        assert process.wait(timeout=120) == 0, process.communicate()[1]
    built = list((tmp_path / "cache").iterdir())
    assert [file.suffix for file in built] == [".so"]
    before = built[0].stat().st_mtime_ns
    load_library(tmp_path / "cache")
    assert built[0].stat().st_mtime_ns == before


def test_says_why_it_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(CompileError, match="writable by nobody else"):
        load_library(open_folder)
    broken = tmp_path / "bin" / "g++"
    broken.parent.mkdir()
    broken.write_text('#!/bin/sh\necho no room >&2\n[ "$1" = --version ]\n')
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent) + os.pathsep + "/bin")
    with pytest.raises(CompileError, match="no room"):
        load_library(tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileError, match="no C"):
        load_library(tmp_path / "cache")
