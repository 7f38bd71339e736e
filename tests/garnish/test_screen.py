"""What reaches a terminal, and what reaches a pipe."""

from __future__ import annotations

import pytest

from garnish.screen import Screen, progress_bar
from garnish.text import printable


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b]0;title\x07\tb\nc\x9b2J\rd é 🦜") == "a�]0;title�\tb\nc�2J�d é 🦜"


def test_a_pipe_gets_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.line("[bold]:smile: \x1b[0m 🦜")
    screen.table(["A", "B"], [["1", "[x]"]])
    screen.progress("loading")
    screen.progress("loading", 0.5)
    screen.end_progress()
    assert capsys.readouterr() == ("[bold]:smile: \x1b[0m 🦜\n1\t[x]\n", "loading\n")


def test_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(as_json=True)
    screen.line("for people")
    screen.table(["A"], [["1"]])
    screen.result({"a": [1]})
    assert capsys.readouterr().out == '{"a":[1]}\n'


@pytest.mark.parametrize(
    ("share", "bar"), [(0.0, "░" * 30 + " 0%"), (0.5, "█" * 15 + "░" * 15 + " 50%"), (1.0, "█" * 30 + " 100%")]
)
def test_a_bar_shows_how_much_is_done(share: float, bar: str) -> None:
    assert progress_bar(share) == bar
