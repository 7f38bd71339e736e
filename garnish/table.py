"""Tables of the command line: fitted to a terminal's width, tab-separated with a header line elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table

from cluster.printable import printable

GAP = 2
"""Characters between two columns."""
_BLANKS = str.maketrans("\t\n", "  ")


@dataclass(frozen=True)
class Column:
    """A column and what becomes of it where the terminal is too narrow."""

    name: str
    number: bool = False
    """Whether it is aligned to the right."""
    least: int = 0
    """Characters that it may shrink to; 0: it keeps its width."""
    cut: bool = False
    """Whether a cell that is too long is cut, with `…` at its end; else it is wrapped."""
    spare: int = 0
    """Above 0: it may be left out, the highest first."""


@dataclass(frozen=True)
class Fitted:
    """What is shown of a table on a terminal."""

    kept: list[int]
    widths: list[int]
    """Of the kept columns, in characters."""
    dropped: list[int]


def tabbed(columns: Sequence[Column], rows: Sequence[Sequence[str]], header: bool) -> str:
    """Returns lines of fields separated by tabs, with all columns. Tabs and line breaks in a cell become blanks."""
    lines = [*([[column.name for column in columns]] if header else []), *rows]
    return "".join("\t".join(cell.translate(_BLANKS) for cell in line) + "\n" for line in lines)


def drawn(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, header: bool) -> tuple[Table, str]:
    """Returns the table for a terminal of `width` characters, and a note on the columns that it leaves out, or ""."""
    shown = [[printable(cell) for cell in row] for row in rows]
    fitted = fit(columns, shown, width)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=header, padding=(0, GAP, 0, 0))
    for at, wide in zip(fitted.kept, fitted.widths, strict=True):
        column = columns[at]
        table.add_column(
            column.name,
            width=wide,
            justify="right" if column.number else "left",
            overflow="ellipsis" if column.cut else "fold",
            no_wrap=column.cut or not column.least,
        )
    for row in shown:
        table.add_row(*(row[at] for at in fitted.kept))
    left_out = ", ".join(columns[at].name for at in fitted.dropped)
    return table, f"left out for the width: {left_out} (--json has all)" if left_out else ""


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Fitted:
    """Chooses columns and their widths: those without content go, then spare ones; then columns shrink, widest first.

    The result is wider than `width` only if all columns that can't be left out, at their least, are.
    """
    natural = [max([cell_len(column.name), *(cell_len(row[at]) for row in rows)]) for at, column in enumerate(columns)]
    floors = [
        min(natural[at], max(column.least, cell_len(column.name))) if column.least else natural[at]
        for at, column in enumerate(columns)
    ]
    kept = [at for at in range(len(columns)) if not rows or any(row[at] for row in rows)]
    dropped: list[int] = []
    while sum(floors[at] + GAP for at in kept) - GAP > width and any(columns[at].spare for at in kept):
        out = max(kept, key=lambda at: columns[at].spare)
        kept.remove(out)
        dropped.append(out)
    widths = {at: natural[at] for at in kept}
    excess = sum(wide + GAP for wide in widths.values()) - GAP - width
    while excess > 0 and (able := [at for at in kept if widths[at] > floors[at]]):
        widths[max(able, key=lambda at: widths[at])] -= 1
        excess -= 1
    return Fitted(kept, [widths[at] for at in kept], sorted(dropped))
