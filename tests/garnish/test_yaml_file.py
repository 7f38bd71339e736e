"""YAML as plain data with lines, and what it may not contain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from garnish.errors import ServiceFileError
from garnish.yaml_file import MAX_BYTES, Document, read_yaml


def read(folder: Path, text: str | bytes, **environment: str) -> Document:
    file = folder / "serverless.yml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(file, environment)


def test_values_and_lines(tmp_path: Path) -> None:
    text = "a: 1\nb:\n  c: [x, 2.5, true, null, ~]\n  d: '7'\n# note\ne: {f: 0x10, g: 1_000, h: yes, i: 2024-01-01}\n"
    document = read(tmp_path, text)
    assert document.value == {
        "a": 1,
        "b": {"c": ["x", 2.5, True, None, None], "d": "7"},
        "e": {"f": 16, "g": 1000, "h": "yes", "i": "2024-01-01"},
    }
    assert document.error(("b", "d"), "no").line == 4
    assert document.error(("b", "missing"), "no").line == 2
    assert str(document.error(("e", "f"), "no")).endswith("serverless.yml:6: e.f: no")


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("a: 1\nb: [", 2, "not valid YAML"),
        ("a: 1\nb: c: d", 2, "not valid YAML"),
        ("a: 1\n\tb: 2", 2, "not valid YAML"),
        ("a: 1\n--- \nb: 2\n", 2, "another document"),
        ("a: *nowhere", 1, "undefined alias"),
        ("a: 1\nb: 2\na: 3\n", 3, "a: the key occurs twice"),
        ("a: !!python/object/apply:os.system [x]", 1, "a: the tag .* is not allowed"),
        ("a: !secret x", 1, "a: the tag .* is not allowed"),
        ("? [a]\n: 1", 1, "expected a plain word as key"),
        ("\na: x${env:MISSING}", 2, "a: the environment variable MISSING is not set"),
        ("[" * 2000, None, "nested too deep"),
        ("a: " + "[" * 40 + "]" * 40, 1, "nested at most"),
        ("a: &a [*a]", 1, "nested at most"),
        (b"a: 1\nb: \xff\n", 2, "UTF-8"),
        ("x" * (MAX_BYTES + 1), None, "at most"),
    ],
)
def test_refused(tmp_path: Path, text: str | bytes, line: int | None, told: str) -> None:
    with pytest.raises(ServiceFileError, match=told) as refused:
        read(tmp_path, text)
    assert refused.value.line == line


def test_a_bomb_of_aliases_is_refused(tmp_path: Path) -> None:
    layers = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    layers += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(ServiceFileError, match="at most 50000 values"):
        read(tmp_path, "\n".join(layers))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ServiceFileError, match=r"nothing.yml: No such file"):
        read_yaml(tmp_path / "nothing.yml")


def test_environment(tmp_path: Path) -> None:
    text = 'a: ${env:HOST}\nb: "http://${env:HOST}:${env:PORT}/"\nc: $HOME ${HOME}\n'
    document = read(tmp_path, text, HOST="gpu-1", PORT="80")
    assert document.value == {"a": "gpu-1", "b": "http://gpu-1:80/", "c": "$HOME ${HOME}"}


PRINTABLE = st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(PRINTABLE, max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abcdefgh.-", min_size=1, max_size=6), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_json_is_yaml(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "drawn.yml"
    file.write_text(json.dumps({"value": value}, ensure_ascii=False))
    assert read_yaml(file, {}).value == {"value": value}
