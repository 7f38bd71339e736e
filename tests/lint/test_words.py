"""The check of words refuses what its table names, and no file has an offence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lint.words import ROOT, check_file, check_page, check_source, load_table, project_files

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
    ('raise ValueError(f"{name} waits in vain")', ["phrase in vain"]),
    ('log.warning("a node was told, and starts anew", extra={"told": 1})', ["phrase told", "phrase anew"]),
]
ALLOWED = [
    "prompt_tokens_left = 1",
    "class Held_rows: ...",
    "use(told)",
    'def f():\n    """Returns the rows. Of these the first is the oldest."""',
    f'"""{"word " * 24}end. {"word " * 30}"""',
    "text = 'Of rows'",
    "use('told', told='told')",
    "raise Refused('Of rows')",
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


def test_no_file_has_an_offence() -> None:
    table = load_table()
    assert {path: offences for path in project_files() if (offences := check_file(path, table))} == {}


def test_each_name_that_stays_is_still_there() -> None:
    table = load_table()
    for path, names in table.written_names.items():
        refused = {offence.text.strip("_") for offence in check_source((ROOT / path).read_text(), table)}
        assert names <= refused, path


def test_the_command_names_an_offence_and_fails(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("told = 1\n")
    command = [sys.executable, "-m", "tests.lint.words", str(tmp_path / "a.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "a.py:1: name told: 'told': report, publish, raise" in done.stdout


def test_a_page_is_checked_in_its_prose() -> None:
    offences = sorted((offence.line, offence.text) for offence in check_page(PAGE, load_table()))
    assert offences == [(1, "anew"), (1, "told"), (3, "goes on"), (12, "told")]
