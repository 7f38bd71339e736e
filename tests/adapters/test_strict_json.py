from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters import strict_json

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(_json)
def test_what_json_writes_is_read_back(value: Any) -> None:
    assert strict_json.loads(json.dumps(value).encode()) == value
    assert strict_json.loads(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"{} {}", "Extra data"),
        (b'{"a": 1, "a": 1}', "occurs twice"),
        (b'[{"b": {"a": 1, "a": 2}}]', "occurs twice"),
        (b"NaN", "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b"[1e999]", "too large"),
        (b"1" * 5000, "^a whole number has too many digits$"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'["\xff"]', "not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    ],
)
def test_ambiguous_or_hostile_texts_are_refused(text: bytes, reason: str) -> None:
    with pytest.raises(strict_json.InvalidJson, match=reason):
        strict_json.loads(text)
