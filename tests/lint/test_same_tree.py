"""The comparison of two commits lets renamed names, docstrings and comments pass, and nothing else."""

from __future__ import annotations

import pytest

from tests.lint.same_tree import Change, compare

EQUAL = [
    ("def told(x): return x", "# why\ndef report(row):\n    'Returns the row.'\n    return row"),
    ("class A:\n    n: int = 0\n    'By it.'", "class B:\n    max_rows: int = 0"),
    ("class E(Exception):\n    'Of E.'", "class E(Exception):\n    pass"),
    ("def f(a): return a\nf(a=1)", "def f(row): return row\nf(row=1)"),
    (
        "from b import y\nfrom a import told, x\ndef told(): x, y",
        "from a import report, x\nfrom b import y\ndef report(): x, y",
    ),
    (
        "def f(x, y):\n    for a in x: a\n    for b in y: b",
        "def f(x, y):\n    for row in x: row\n    for row in y: row",
    ),
    ("def f(a):\n    b = a.c()\n    return b", "def f(a):\n    a = a.c()\n    return a"),
    ("def f(x): return [a for a in x] + [b for b in x]", "def f(x): return [c for c in x] + [c for c in x]"),
    ("match 1:\n    case told: told", "match 1:\n    case number: number"),
]
DIFFERENT = [
    ("x = 1", "x = 2"),
    ("x = 1", "x = 1\ny = 2"),
    ("def f(a): return a", "def f(a, b): return a"),
    ("import time\ntime.time()", "import time\ntime.monotonic()"),
    ("a = len(b)", "a = max(b)"),
    ("def f(a, b): return a - b", "def f(a, b): return b - a"),
    ("def f(a, b): return a - b", "def f(c, d): return d - c"),
    ("def f(a):\n    b = 1\n    return a + b", "def f(a):\n    a = 1\n    return a + a"),
    ("from json import loads", "from json import dumps"),
    ("raise ValueError('told')", "raise ValueError('report')"),
    ("def told(): return 'told'", "def report(): return 'report'"),
    ("try: a\nexcept ValueError as b: pass", "try: a\nexcept ValueError: pass"),
]


@pytest.mark.parametrize(("before", "after"), EQUAL)
def test_renamed_names_and_docstrings_are_equal(before: str, after: str) -> None:
    assert compare([Change("a.py", "a.py", before, after)]) == {}


@pytest.mark.parametrize(("before", "after"), DIFFERENT)
def test_it_refuses(before: str, after: str) -> None:
    assert compare([Change("a.py", "a.py", before, after)])["a.py"].refused


def test_a_moved_module_is_compared_under_its_new_path() -> None:
    moved = Change("gateway/hold.py", "gateway/wait.py", "def told(): ...", "def report(): ...")
    use = Change("b.py", "b.py", "from gateway.hold import told\ntold()", "from gateway.wait import report\nreport()")
    assert compare([moved, use]) == {}
    assert compare([use])["b.py"].refused  # what it names is defined nowhere
    started = Change("b.py", "b.py", "start('gateway.hold')", "start('gateway.wait')")
    assert not compare([moved, started])["b.py"].refused
    assert compare([started])["b.py"].refused


def test_strings_that_name_a_renamed_attribute_are_listed() -> None:
    product = Change(
        "hold.py", "hold.py", "class A:\n    told = getattr(0, 'told')", "class A:\n    seen = getattr(0, 'seen')"
    )
    test = Change("tests/a.py", "tests/a.py", "patch('hold.A.told')", "patch('hold.A.seen')")
    differences = compare([product, test])
    assert [len(each.strings) for each in differences.values()] == [1, 1]
    assert not any(each.refused for each in differences.values())
    assert compare([test])["tests/a.py"].refused


def test_a_file_that_is_added_or_removed_differs() -> None:
    assert compare([Change("", "a.py", "", "x = 1"), Change("b.py", "", "x = 1", "")]).keys() == {"a.py", "b.py"}
    assert compare([Change("", "a/__init__.py", "", '"""A package."""')]) == {}
