"""Committed profiles are whole; others are refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from garnish.simulation.profile import FOLDER, ProfileError, load_profile, profile_names


@pytest.mark.parametrize("name", profile_names())
def test_committed_ones(name: str) -> None:
    profile = load_profile(name)
    assert profile.notes
    assert profile.source == ("papers" if name == "papers" else "measured")


def test_the_papers_constants_are_marked_and_give_their_figures() -> None:
    profile = load_profile("papers")
    assert "Not measured by us" in profile.notes
    decode, prefill = profile.performance.decode, profile.performance.prefill
    assert decode.seconds(24, 0, 24 * 32) == pytest.approx(0.0348)
    assert decode.seconds(16, 0, 16 * 64) == pytest.approx(0.0358)
    assert prefill.seconds(256, 0, 0) == pytest.approx(0.044, rel=0.001)
    assert prefill.seconds(1024, 0, 0) == pytest.approx(0.090, rel=0.001)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kv_tokens": 0}, "kv_tokens must be at least 1"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"source": "guessed"}, "source"),
        ({"kv_tokens": None}, "kv_tokens"),
        ({"performance": {"decode": {"base": -1.0}}}, "decode.base"),
        ({"performance": {"decode": {"rank_term": "mean"}}}, "rank_term"),
        ({"performance": {"exposed_share": 1.5}}, "exposed_share"),
        ({"performance": {"to_device": {"bandwidth": 0.0}}}, "to_device"),
        ({"performance": {"from_store": {"bandwidth": 0.5}}}, "from_store"),
        ({"performance": {"decode": {"flat_rows": -1}}}, "decode.flat_rows"),
        ({"performance": {"version": 99}}, "version is 99"),
    ],
)
def test_refused(tmp_path: Path, change: dict, problem: str) -> None:
    document = json.loads((FOLDER / "papers.json").read_text())
    _merge(document, change)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=problem) as caught:
        load_profile(str(file))
    assert "mine.json" in str(caught.value)


def _merge(into: dict, change: dict) -> None:
    for name, value in change.items():
        if isinstance(value, dict):
            _merge(into[name], value)
        else:
            into[name] = value


def test_unknown_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"neither a file nor one of the committed ones \(.*papers"):
        load_profile("nothing")
    (tmp_path / "cut.json").write_text('{"title": "x"')
    with pytest.raises(ProfileError, match=r"cut\.json"):
        load_profile(str(tmp_path / "cut.json"))
