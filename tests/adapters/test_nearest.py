"""Mistyped names."""

from __future__ import annotations

import difflib
from functools import cache
from hashlib import sha1

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.nearest import NameIndex, did_you_mean, nearest

NAMES = st.text(alphabet="abcde-0123", min_size=1, max_size=20)
MANY = [f"tune-{sha1(b'%d' % number).hexdigest()[:8]}-summarize" for number in range(10_000)]


@cache
def index() -> NameIndex:
    return NameIndex(MANY)


@given(typed=NAMES, known=st.lists(NAMES, max_size=8, unique=True))
def test_few_names_are_compared_as_difflib_does(typed: str, known: list[str]) -> None:
    others = [name for name in known if name != typed]
    best = max((difflib.SequenceMatcher(None, name, typed).ratio() for name in others), default=0.0)
    for found in (nearest(typed, known), NameIndex(known).nearest(typed)):
        assert len(found) == (best >= 0.7)
        assert all(difflib.SequenceMatcher(None, name, typed).ratio() == best for name in found)


@given(name=st.sampled_from(MANY), place=st.integers(0, 22), letter=st.sampled_from(["", "x"]), lost=st.integers(0, 1))
def test_one_mistake_in_one_of_many_names(name: str, place: int, letter: str, lost: int) -> None:
    typed = name[:place] + letter + name[place + lost :]
    if typed != name:
        assert index().nearest(typed) == [name]


@pytest.mark.parametrize(
    ("typed", "known", "message"),
    [
        ("pirat", ["support", "pirate"], "; did you mean 'pirate'?"),
        ("Pirate", ["pirate"], "; did you mean 'pirate'?"),
        ("smollm2-135m-instruct", ["SmolLM2-135M-Instruct"], "; did you mean 'SmolLM2-135M-Instruct'?"),
        ("pirate", ["pirate"], ""),  # it is that name
        ("nobody", ["support", "pirate"], ""),
        ("", ["a"], ""),
        ("x" * 100_000, ["x" * 64], "; did you mean '" + "x" * 64 + "'?"),
    ],
)
def test_messages(typed: str, known: list[str], message: str) -> None:
    assert did_you_mean(typed, known) == message
