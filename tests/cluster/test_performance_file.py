"""Stored performance models: what is read is what was measured here, or it is refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.performance_file import MAX_BYTES, BadPerformanceFile, read_performance, write_performance
from cluster.performance_model import ModelKey
from tests.cluster.measured import KEY, PROFILE


def test_a_written_model_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "node-1.performance.json"
    write_performance(PROFILE, file)
    assert read_performance(file, KEY) == read_performance(file, None) == PROFILE
    assert PROFILE.model.key == KEY
    assert (PROFILE.model.decode, PROFILE.model.exposed_share) == (PROFILE.decode.model, 0.6)
    assert [path.name for path in file.parent.iterdir()] == ["node-1.performance.json"]


@pytest.mark.parametrize("field", list(ModelKey.__struct_fields__))
def test_a_model_of_something_else_is_refused(tmp_path: Path, field: str) -> None:
    file = tmp_path / "model.json"
    write_performance(PROFILE, file)
    other = replace(KEY, **{field: "other"})
    with pytest.raises(BadPerformanceFile, match=rf"measured on {field} .*\(here: 'other'\); run `garnish profile`"):
        read_performance(file, other)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("decode.quality.heldout_median_error", -0.1, "held-out error -0.1"),
        ("version", 2, "version 2"),
        ("decode.model.base", -1e-3, "decode.base is -0.001"),
        ("decode.model.per_rank", 1e300, "decode.per_rank"),
        ("decode.model.per_row", None, "per_row"),
        ("decode.model.rank_term", "ranks", "rank_term"),
        ("decode.model.flat_rows", -1, "decode.flat_rows"),
        ("prefill.model.per_token", -1, "prefill.per_token"),
        ("prefill.quality.r2", 1.5, r"R\^2 of prefill"),
        ("to_device.bandwidth", 0, "to_device"),
        ("from_store.latency", -1, "from_store"),
        ("exposed_share", 1.5, "exposed_share"),
        ("color", "red", "color"),
    ],
)
def test_numbers_that_nobody_measured_are_refused(tmp_path: Path, path: str, value: Any, word: str) -> None:
    file = tmp_path / "model.json"
    document: dict[str, Any] = msgspec.to_builtins(PROFILE)
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    place[last] = value
    file.write_text(json.dumps(document))
    with pytest.raises(BadPerformanceFile, match=word) as caught:
        read_performance(file, KEY)
    assert "run `garnish profile`" in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_poor_fit_is_refused_unless_it_forecasts_well(tmp_path: Path) -> None:
    """Where all steps take much the same time there is nothing for R^2 to explain."""
    file = tmp_path / "model.json"
    for error, thorough, good in ((0.04, True, True), (0.2, True, False), (0.2, False, True), (0.3, False, False)):
        quality = replace(PROFILE.decode.quality, r2=0.5, heldout_median_error=error)
        write_performance(replace(PROFILE, decode=replace(PROFILE.decode, quality=quality), thorough=thorough), file)
        if good:
            assert read_performance(file, KEY).decode.quality == quality
        else:
            with pytest.raises(
                BadPerformanceFile, match=rf"R\^2 of decode is 0.5 and its held-out error {error}; at least"
            ):
                read_performance(file, KEY)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff", b"NaN", b"[" * 100_000, b'{"key": 1}', b" " * (MAX_BYTES + 1)]
)
def test_what_is_no_model_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "model.json"
    file.write_bytes(text)
    with pytest.raises(BadPerformanceFile):
        read_performance(file, KEY)


@given(st.data())
def test_a_cut_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.json"
    write_performance(PROFILE, file)
    whole = file.read_bytes().rstrip()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(BadPerformanceFile):
        read_performance(file, KEY)
