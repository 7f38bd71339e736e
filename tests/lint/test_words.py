"""The check of words refuses what its table names, and its list of offences may only shrink."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.lint.words import ROOT, check_page, check_source, format_counts, load_table, new_offences, parse_counts

REFUSED = [
    ("told = 1", ["name told"]),
    ("self._found = 1", ["name found"]),
    ("def known(): ...", ["name known"]),
    ("def f(whole): ...", ["name whole"]),
    ("MOST_ROWS = 1", ["name MOST_*"]),
    ("class Wish: ...", ["class Wish"]),
    ('"""Of rows."""', ["opening"]),
    ('class Pool:\n    size: int\n    """By which it is bounded."""', ["opening"]),
    (f'"""{"word " * 26}"""', ["length"]),
    ('"""Waits in vain."""', ["phrase in vain"]),
]
ALLOWED = [
    "prompt_tokens_left = 1",
    "class Held_rows: ...",
    "use(told)",
    'def f():\n    """Returns the rows. Of these the first is the oldest."""',
    f'"""{"word " * 24}end. {"word " * 30}"""',
    "text = 'Of rows'",
]


PAGE = """# A page told anew

It goes
on. `told` and [a link](told.md) are no prose.

```sh
told
```
<!-- told -->
What is written here was told.
<!-- /told -->
A list told:

  ```
  told
  ```
"""


@pytest.mark.parametrize(("source", "kinds"), REFUSED)
def test_it_refuses(source: str, kinds: list[str]) -> None:
    assert [offence.kind for offence in check_source(source, load_table())] == kinds


@pytest.mark.parametrize("source", ALLOWED)
def test_it_allows(source: str) -> None:
    assert list(check_source(source, load_table())) == []


def test_counts_are_read_as_they_were_written() -> None:
    counts = {"a/b.py": Counter({"phrase of its own": 2, "name told": 1}), "c.py": Counter({"opening": 3})}
    assert parse_counts(format_counts(counts)) == counts


def test_more_than_listed_is_new() -> None:
    listed = {"a.py": Counter({"opening": 2})}
    assert new_offences({"a.py": Counter({"opening": 2})}, listed) == []
    assert new_offences({"a.py": Counter({"opening": 1})}, listed) == []
    assert new_offences({"a.py": Counter({"opening": 3})}, listed) == ["a.py: opening: 3, 2 listed"]
    assert new_offences({"b.py": Counter({"opening": 1})}, listed) == ["b.py: opening: 1, 0 listed"]


def test_the_list_is_todays() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.lint.words"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_file_is_shown_with_what_to_say_instead(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("told = 1\n")
    command = [sys.executable, "-m", "tests.lint.words", "--show", str(tmp_path / "a.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "a.py:1: name told: 'told': report, publish, raise" in done.stdout


def test_a_page_is_checked_in_its_prose() -> None:
    offences = sorted((offence.line, offence.text) for offence in check_page(PAGE, load_table()))
    assert offences == [(1, "anew"), (1, "told"), (3, "goes on"), (12, "told")]
