"""What reaches a terminal, and what reaches a pipe."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from cluster.printable import printable
from garnish.screen import GAP, Column, Screen, fit, make_table, progress_bar
from garnish.sizes import format_time


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b]0;title\x07\tb\nc\x9b2J\rd é 🦜") == "a�]0;title�\tb\nc�2J�d é 🦜"


def test_a_pipe_gets_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.line("[bold]:smile: \x1b[0m 🦜")
    screen.table([Column("A", spare=1), Column("B")], [["1", "[x]"], ["2\t2", "y\nz" * 99]])
    screen.progress("loading")
    screen.progress("loading", 0.5)
    screen.end_progress()
    assert capsys.readouterr() == ("[bold]:smile: \x1b[0m 🦜\nA\tB\n1\t[x]\n2 2\t" + "y z" * 99 + "\n", "loading\n")


def test_a_pipe_gets_no_header_if_it_wants_none(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(header=False).table([Column("A"), Column("B")], [["1", ""]])
    assert capsys.readouterr().out == "1\t\n"


CELLS = st.text("ab é🦜\t\x1b", max_size=30)
COLUMNS = st.builds(
    Column,
    name=st.text("AB", max_size=12),
    number=st.booleans(),
    min_width=st.integers(0, 20),
    cut=st.booleans(),
    spare=st.integers(0, 2),
)


@given(data=st.data(), columns=st.lists(COLUMNS, min_size=1, max_size=8), width=st.integers(20, 200))
def test_a_table_fits_where_it_can(data: st.DataObject, columns: list[Column], width: int) -> None:
    row = st.tuples(*(CELLS for _ in columns)).map(list)
    rows = [[printable(cell).replace("\t", " ") for cell in cells] for cells in data.draw(st.lists(row, max_size=4))]
    fitted = fit(columns, rows, width)
    if sum(wide + GAP for wide in fitted.widths) - GAP > width:
        assert not any(columns[at].spare for at in fitted.shown), "what can be left out is"
        return
    for at in set(range(len(columns))) - {*fitted.shown, *fitted.dropped}:
        assert not any(cells[at] for cells in rows), "nothing else is left out"
    console = Console(width=width, soft_wrap=True, color_system=None, record=True, file=io.StringIO())
    console.print(make_table(columns, rows, width, header=True)[0])
    lines = console.export_text().splitlines()
    assert all(cell_len(line) <= width + GAP and cell_len(line.rstrip()) <= width for line in lines)
    whole = [at for at in fitted.shown if not columns[at].cut]
    text = "".join("".join(lines).split())
    assert all(set("".join(cells[at].split())) <= set(text) for cells in rows for at in whole)


def test_a_narrow_terminal_wraps_cuts_and_leaves_out() -> None:
    columns = [
        Column("NAME", min_width=6),
        Column("DIGEST", min_width=8, cut=True),
        Column("N", number=True),
        Column("URL", spare=1),
    ]
    table, note = make_table(columns, [["one two three", "0123456789abcdef", "7", "http://x"]], 20, header=True)
    console = Console(width=20, soft_wrap=True, color_system=None, record=True, file=io.StringIO())
    console.print(table)
    shown = [line.rstrip() for line in console.export_text().splitlines()]
    assert shown == ["NAME     DIGEST    N", "one two  0123456…  7", "three"]
    assert note == "left out for the width: URL (--json has all)"


def test_moments_are_in_utc() -> None:
    assert format_time(0.9) == "1970-01-01T00:00:00Z"


def test_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(as_json=True)
    screen.line("for people")
    screen.table([Column("A")], [["1"]])
    screen.result({"a": [1]})
    assert capsys.readouterr().out == '{"a":[1]}\n'


@pytest.mark.parametrize(
    ("share", "bar"), [(0.0, "░" * 30 + " 0%"), (0.5, "█" * 15 + "░" * 15 + " 50%"), (1.0, "█" * 30 + " 100%")]
)
def test_a_bar_shows_how_much_is_done(share: float, bar: str) -> None:
    assert progress_bar(share) == bar
