"""Output of the command line: results on standard output, progress and problems on standard error.

On a terminal tables are fitted to its width. Otherwise they are lines of tab-separated fields, after a header line.
"""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from cluster.printable import printable

BAR_WIDTH = 30
GAP = 2
_BLANKS = str.maketrans("\t\n", "  ")


class Screen:
    """Writes a command's output: tables and a spinner on a terminal, plain lines otherwise.

    With `as_json` only results are written, as JSON. With `header` tables have a header line.
    """

    def __init__(self, as_json: bool = False, *, header: bool = True) -> None:
        self.as_json = as_json
        self._header = header
        self._out = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._err = Console(file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.end_progress()

    @property
    def is_terminal(self) -> bool:
        return self._out.is_terminal

    def line(self, text: str = "") -> None:
        """Writes a line of readable text; does nothing with `as_json`."""
        if not self.as_json:
            self.piece(text + "\n")

    def styled(self, text: str) -> None:
        """Writes a line that may contain control characters of this program; does nothing with `as_json`."""
        if not self.as_json:
            self._out.file.write(text + "\n")
            self._out.file.flush()

    def piece(self, text: str) -> None:
        """Writes text immediately, without a line break. On a terminal control characters in it are removed."""
        self._out.file.write(printable(text) if self.is_terminal else text)
        self._out.file.flush()

    def pieces(self, content: Iterable[bytes]) -> None:
        """Writes a stream of UTF-8 text, chunk by chunk."""
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        for piece in content:
            self.piece(decoder.decode(piece))

    def result(self, value: Any) -> None:
        """Writes the command's result as JSON; does nothing without `as_json`."""
        if self.as_json:
            self._out.file.write(msgspec.json.encode(value).decode() + "\n")
            self._out.file.flush()

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Writes a table; does nothing with `as_json`."""
        if self.as_json:
            return
        if not self.is_terminal:
            self.piece(format_tabbed(columns, rows, self._header))
            return
        table, dropped = make_table(columns, rows, self._out.width, self._header)
        self._out.print(table)
        if dropped:
            self.notice(dropped)

    def progress(self, text: str, share: float | None = None) -> None:
        """Shows the current step, and the completed share of it (0 to 1).

        On a terminal the text replaces the previous one. Otherwise the text is printed as a new line if it has changed.
        """
        if self._err.is_terminal:
            if self._status is None:
                self._status = self._err.status("")
                self._status.start()
            self._status.update(escape(printable(text if share is None else f"{text} {progress_bar(share)}")))
        elif text != self._last:
            self._err.print(printable(text))
        self._last = text

    def end_progress(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def notice(self, text: str) -> None:
        """Writes a line to standard error."""
        self._err.print(printable(text))


def progress_bar(share: float) -> str:
    """Returns a progress bar of BAR_WIDTH characters with the percentage, for a share of 0 to 1."""
    done = min(BAR_WIDTH, max(0, int(share * BAR_WIDTH)))
    return f"{'█' * done}{'░' * (BAR_WIDTH - done)} {share:.0%}"


@dataclass(frozen=True)
class Column:
    """A column of a table, with its rules for a narrow terminal."""

    name: str
    number: bool = False
    min_width: int = 0
    """minimum width in characters to which the column may shrink; 0 means that the column does not shrink"""
    cut: bool = False
    spare: int = 0
    """a column above 0 may be left out; the column with the largest value is left out first"""


@dataclass(frozen=True)
class Fitted:
    """Layout of a table on a terminal. Columns are indices from 0."""

    shown: list[int]
    widths: list[int]
    dropped: list[int]


def format_tabbed(columns: Sequence[Column], rows: Sequence[Sequence[str]], header: bool) -> str:
    """Returns the table as lines of tab-separated fields. Tabs and line breaks in a cell become blanks."""
    lines = [*([[column.name for column in columns]] if header else []), *rows]
    return "".join("\t".join(cell.translate(_BLANKS) for cell in line) + "\n" for line in lines)


def make_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, header: bool) -> tuple[Table, str]:
    """Returns the table for a terminal of `width` characters, and a line about omitted columns (empty if none)."""
    shown = [[printable(cell) for cell in row] for row in rows]
    fitted = fit(columns, shown, width)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=header, padding=(0, GAP, 0, 0))
    for at, wide in zip(fitted.shown, fitted.widths, strict=True):
        column = columns[at]
        table.add_column(
            column.name,
            width=wide,
            justify="right" if column.number else "left",
            overflow="ellipsis" if column.cut else "fold",
            no_wrap=column.cut or not column.min_width,
        )
    for row in shown:
        table.add_row(*(row[at] for at in fitted.shown))
    left_out = ", ".join(columns[at].name for at in fitted.dropped)
    return table, f"left out for the width: {left_out} (--json has all)" if left_out else ""


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Fitted:
    """Returns the layout for `width` characters.

    Columns without content are dropped, then spare ones; then the widest columns are shrunk. The result is wider than
    `width` only if the required columns at their minimum widths are wider.
    """
    natural = [max([cell_len(column.name), *(cell_len(row[at]) for row in rows)]) for at, column in enumerate(columns)]
    floors = [
        min(natural[at], max(column.min_width, cell_len(column.name))) if column.min_width else natural[at]
        for at, column in enumerate(columns)
    ]
    shown = [at for at in range(len(columns)) if not rows or any(row[at] for row in rows)]
    dropped: list[int] = []
    while sum(floors[at] + GAP for at in shown) - GAP > width and any(columns[at].spare for at in shown):
        out = max(shown, key=lambda at: columns[at].spare)
        shown.remove(out)
        dropped.append(out)
    widths = {at: natural[at] for at in shown}
    excess = sum(wide + GAP for wide in widths.values()) - GAP - width
    while excess > 0 and (shrinkable := [at for at in shown if widths[at] > floors[at]]):
        widths[max(shrinkable, key=lambda at: widths[at])] -= 1
        excess -= 1
    return Fitted(shown, [widths[at] for at in shown], sorted(dropped))
