"""What the command line writes: results on standard output, progress and problems on standard error."""

from __future__ import annotations

import sys
from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from cluster.printable import printable
from garnish.table import Column, drawn, tabbed

BAR_WIDTH = 30
"""Characters."""


class Screen:
    """Tables and a spinner on a terminal, plain lines elsewhere; with `as_json`, results are JSON only.

    `header`: whether tables have one.
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
        """Writes a line for people; nothing with `as_json`."""
        if not self.as_json:
            self.piece(text + "\n")

    def styled(self, text: str) -> None:
        """Writes a line whose control characters are ours; nothing with `as_json`."""
        if not self.as_json:
            self._out.file.write(text + "\n")
            self._out.file.flush()

    def piece(self, text: str) -> None:
        """Writes text as it comes, without a line break; a terminal gets no control characters of others."""
        self._out.file.write(printable(text) if self.is_terminal else text)
        self._out.file.flush()

    def pieces(self, content: Iterable[bytes]) -> None:
        """Writes UTF-8 text that is too long to hold, as it comes."""
        decoder = getincrementaldecoder("utf-8")(errors="replace")
        for piece in content:
            self.piece(decoder.decode(piece))

    def result(self, value: Any) -> None:
        """Writes the command's outcome as JSON; nothing without `as_json`."""
        if self.as_json:
            self._out.file.write(msgspec.json.encode(value).decode() + "\n")
            self._out.file.flush()

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
        """Writes a table for people; nothing with `as_json`."""
        if self.as_json:
            return
        if not self.is_terminal:
            self.piece(tabbed(columns, rows, self._header))
            return
        table, note = drawn(columns, rows, self._out.width, self._header)
        self._out.print(table)
        if note:
            self.note(note)

    def progress(self, text: str, share: float | None = None) -> None:
        """Tells what is being done now, and which share of it is done: replaces the line before on a terminal;
        elsewhere prints a new line when the text has changed."""
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

    def note(self, text: str) -> None:
        """Writes something that happened to standard error."""
        self._err.print(printable(text))


def progress_bar(share: float) -> str:
    """Returns a bar of BAR_WIDTH characters for a share of 0 to 1, and the percentage."""
    done = min(BAR_WIDTH, max(0, int(share * BAR_WIDTH)))
    return f"{'█' * done}{'░' * (BAR_WIDTH - done)} {share:.0%}"
