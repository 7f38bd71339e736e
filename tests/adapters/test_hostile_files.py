"""Whatever the two files hold, reading them ends in a layout or in a typed refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft_files import safetensors_bytes, validate

from adapters.base_model import BaseModel
from adapters.errors import AdapterError, InvalidAdapter, Problem
from adapters.peft_config import HARMLESS, REFUSED, SERVED
from adapters.peft_format import read_peft

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_fields = st.sampled_from([*SERVED, *HARMLESS, *REFUSED]) | st.text(max_size=8)
_offsets = st.lists(st.integers(-1, 1 << 70) | st.integers(0, 5000), min_size=2, max_size=2)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "F4", "??"]),
        "shape": st.lists(st.integers(0, 64) | st.integers(-5, 1 << 60), max_size=3),
        "data_offsets": _offsets,
    }
)


def read(config: bytes, weights: Path, base: BaseModel) -> None:
    """Read and check; only the package's own errors may come out, with texts that JSON can carry."""
    problems: list[Problem] = []
    try:
        assert validate(read_peft(config, weights), base).ranks
    except InvalidAdapter as error:
        problems = error.problems
    except AdapterError:
        return
    for problem in problems:
        json.dumps([problem.tensor, problem.problem, problem.expected, problem.found]).encode()
        assert len(problem.tensor) <= 300
        assert len(problem.found or "") <= 300


@given(changes=st.dictionaries(_fields, _json, max_size=4))
def test_any_field_may_hold_anything(good: tuple[bytes, Path], base: BaseModel, changes: dict[str, Any]) -> None:
    read(json.dumps({**json.loads(good[0]), **changes}).encode(), good[1], base)


@given(data=st.data())
def test_any_bytes_may_be_changed_cut_or_added(
    tmp_path_factory: pytest.TempPathFactory, good: tuple[bytes, Path], base: BaseModel, data: st.DataObject
) -> None:
    raw = bytearray(good[1].read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        # Most of the file is numbers; the header is where bytes have a meaning.
        spot = data.draw(st.integers(0, 300) | st.integers(0, len(raw) - 1))
        raw[spot] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(raw)) | st.integers(0, len(raw)))
    path = tmp_path_factory.mktemp("changed") / "weights"
    path.write_bytes(bytes(raw[:end]) + data.draw(st.just(b"") | st.binary(max_size=8)))
    read(good[0], path, base)


@given(table=st.dictionaries(st.text(max_size=8), _entries | _json, max_size=4), size=st.integers(0, 5000))
def test_any_table_may_be_stated(
    tmp_path_factory: pytest.TempPathFactory, good: tuple[bytes, Path], base: BaseModel, table: Any, size: int
) -> None:
    path = tmp_path_factory.mktemp("stated") / "weights"
    path.write_bytes(safetensors_bytes(json.dumps(table).encode(), bytes(size)))
    read(good[0], path, base)
