"""What a batch's file is read as, against a reader that has it whole."""

from __future__ import annotations

import codecs
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches import forms, lines
from gateway.batches.lines import LineScanner

URL = "/v1/completions"


def scanned(content: bytes, pieces: list[int]) -> LineScanner:
    """`pieces`: where the content is cut."""
    scanner, at = LineScanner(URL), 0
    for end in [*sorted(pieces), len(content)]:
        if end > at and not scanner.full:
            scanner.feed(content[at:end])
            at = end
    scanner.end()
    return scanner


def line(custom_id: object = "a", **changed: object) -> bytes:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "f", "prompt": "x"}} | changed
    ).encode()


def test_different_forms_are_found_by_their_first_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, object]] = [
        {}, {"tools": None}, {"tools": [1]}, {"response_format": {"a": 1}}, {"tools": [1]}, {"tools": [1, 2]},
        {"structured_outputs": {}},
    ]  # fmt: skip
    content = b"\n".join(line(str(at), body={"model": "f", **body}) for at, body in enumerate(bodies))
    found = scanned(content, [90]).forms.lines
    assert [form.line for form in found] == [3, 4, 6, 7]
    assert json.loads(found[1].fields)["response_format"] == {"a": 1}
    monkeypatch.setattr(forms, "MAX_FORMS", 2)
    assert [form.line for form in scanned(content, []).forms.lines] == [3, 4]


HOSTILE = {
    "invalid_json_line": [b"{", b"nonsense", line() + b" {}", b'{"x": ' + b"[" * 100_000],
    "invalid_line": [b"[]", b"1", b"null", b"{}", line(custom_id=7), line(url=None)],
    "invalid_encoding": [b'{"custom_id": "\xff"}', b"\xff\xfe"],
    "invalid_method": [line(method="GET")],
    "invalid_url": [line(url="/v1/chat/completions"), line(url="/nodes")],
    "invalid_custom_id": [line(custom_id=""), line(custom_id="x" * 257)],
    "invalid_body": [
        line(body=[]), line(body={}), line(body={"model": 1}), line(body={"model": "f", "stream": True}),
        line(body=None),
    ],
    "line_too_long": [line(body={"model": "f", "prompt": "x" * lines.MAX_LINE_BYTES})],
    "duplicate_custom_id": [line(custom_id="first")],
}  # fmt: skip
GOOD = [line(f"c{number}", body={"model": f"f{number % 3}", "prompt": "é" * number}) for number in range(6)]


@pytest.mark.parametrize(("code", "bad"), [(code, bad) for code, many in HOSTILE.items() for bad in many])
def test_each_bad_line_is_named_by_its_number(code: str, bad: bytes) -> None:
    content = b"\n".join([line("first"), b"", bad, line("last")])
    found = scanned(content, [1, len(content) // 2]).problems
    assert [(problem.code, problem.line) for problem in found] == [(code, 3)]


@given(st.lists(st.sampled_from([*GOOD, b"", b" \t", b"{", line("c1", method="PUT")]), max_size=14), st.data())
def test_any_cut_of_a_file_is_read_as_the_whole(chosen: list[bytes], data: st.DataObject) -> None:
    content = b"\n".join(chosen)
    pieces = data.draw(st.lists(st.integers(0, len(content)), max_size=8))
    scanner = scanned(content, pieces)
    seen: set[str] = set()
    right, wrong = [], []
    for number, text in enumerate(content.split(b"\n"), start=1):
        try:
            call = json.loads(text) if text.strip() else None
        except ValueError:
            wrong.append((number, "invalid_json_line"))
            continue
        if call is None:
            continue
        if call["method"] != "POST":
            wrong.append((number, "invalid_method"))
        elif call["custom_id"] in seen:
            wrong.append((number, "duplicate_custom_id"))
        else:
            seen.add(call["custom_id"])
            right.append((number, text, call["body"]["model"]))
    if not right and not wrong:
        wrong = [(None, "empty_file")]
    assert [(problem.line, problem.code) for problem in scanner.problems] == wrong
    spans = zip(scanner.numbers, scanner.starts, scanner.sizes, strict=True)
    assert [(number, content[at : at + size]) for number, at, size in spans] == [entry[:2] for entry in right]
    models = [right[index][2] for index in scanner.order()]
    assert sorted(scanner.order()) == list(range(len(right)))
    runs = [model for at, model in enumerate(models) if at == 0 or models[at - 1] != model]
    assert len(runs) == len(set(models)), "each model's calls are one behind the other"
    assert runs == list(dict.fromkeys(entry[2] for entry in right)), "models as they first occur"


def test_calls_of_a_batch_are_not_asynchronous() -> None:
    scanner = LineScanner("/invoke")
    for at, background in enumerate((False, True)):
        scanner.feed(line(str(at), url="/invoke", body={"model": "f", "background": background}) + b"\n")
    scanner.end()
    assert [(problem.line, problem.code, problem.param) for problem in scanner.problems] == [
        (2, "invalid_body", "body.background")
    ]


def test_a_function_comes_with_its_versions() -> None:
    names = ["f", "g", "f:2", "g:prod", "f", "f:2"]
    content = b"\n".join(line(str(at), body={"model": name}) for at, name in enumerate(names))
    assert [names[index] for index in scanned(content, []).order()] == ["f", "f", "f:2", "f:2", "g", "g:prod"]


def test_lines_and_problems_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 20)
    many = b"\n".join(line(str(number)) for number in range(20))
    assert scanned(many, [10]).problems == []
    assert [problem.code for problem in scanned(many + b"\n" + line("more"), [10]).problems] == ["too_many_lines"]
    assert len(scanned(b"{\n" * 1000, []).problems) == lines.MAX_PROBLEMS


def test_blank_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_BLANK_LINES", 20)
    assert scanned(line() + b"\n" * 21, [10]).problems == []
    scanner = scanned(line() + b"\n" * 100_000, [10])
    assert [problem.code for problem in scanner.problems] == ["too_many_lines"]
    assert scanner._number < 30, "the rest was not looked at"


def test_long_names_of_models_are_not_kept() -> None:
    scanner = LineScanner(URL)
    names = [f"{'x' * 500_000}{at % 3}:{at % 2}" for at in range(12)]
    tracemalloc.start()
    for at, name in enumerate(names):
        scanner.feed(line(str(at), body={"model": name}) + b"\n")
    scanner.end()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert scanner.problems == []
    assert kept < 1_500_000, "six names are twice as much"
    order = [names[index] for index in scanner.order()]
    runs = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    assert len(runs) == 6
    functions = [name.partition(":")[0] for name in runs]
    assert functions[0::2] == functions[1::2] == [name.partition(":")[0] for name in names[:3]]


def test_a_line_without_end_is_not_kept() -> None:
    scanner = LineScanner(URL)
    for _ in range(50):
        scanner.feed(b"x" * (lines.MAX_LINE_BYTES // 2))
        assert len(scanner._rest) <= lines.MAX_LINE_BYTES
    scanner.feed(b"\n" + line("next"))
    scanner.end()
    assert [(problem.code, problem.line) for problem in scanner.problems] == [("line_too_long", 1)]
    assert list(scanner.numbers) == [2]


@pytest.mark.parametrize("cut", range(5))
def test_a_byte_order_mark_at_the_begin_is_skipped(cut: int) -> None:
    """As some editors write it; inside of the file it is no JSON."""
    content = codecs.BOM_UTF8 + line("a") + b"\n" + line("b")
    found = scanned(content, [cut])
    assert not found.problems
    assert [content[start : start + size] for start, size in zip(found.starts, found.sizes, strict=True)] == [
        line("a"),
        line("b"),
    ]
    inside = scanned(line("a") + b"\n" + codecs.BOM_UTF8 + line("b"), [cut]).problems
    assert [(problem.code, problem.line) for problem in inside] == [("invalid_json_line", 2)]
