"""Lines of a trace file, plain or gzipped, and cells of CSV lines with their position."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

MAX_LINE = 1 << 20
"""Maximum number of characters in a line. A function's counts of a day take a few thousand."""
MAX_TOKENS = 10_000_000

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Line:
    file: str
    number: int
    text: str

    def error(self, column: int, problem: str) -> TraceError:
        return TraceError(self.file, self.number, column, problem)


@dataclass(frozen=True)
class Cell:
    line: Line
    column: int
    text: str
    name: str

    def number(self, kind: Callable[[str], T], low: float, high: float) -> T:
        """Returns the cell's number, from `low` to `high`. Raises TraceError for anything else."""
        try:
            value = kind(self.text)
        except ValueError:
            raise self.error(f"expected a number, found {self.text[:40]!r}") from None
        if not low <= value <= high:  # NaN fails too; a number of many digits must not become a float
            raise self.error(f"expected {low:g} to {high:g}, found {self.text[:40]!r}")
        return value

    def error(self, problem: str) -> TraceError:
        return self.line.error(self.column, f"{self.name}: {problem}")


def read_lines(file: Path) -> Iterator[Line]:
    """Yields the lines that are not empty. Raises TraceError, including for a file that can't be read."""
    number = 0
    try:
        with file.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(file, "rt", encoding="utf-8") if packed else file.open("rt", encoding="utf-8") as stream:
            while text := stream.readline(MAX_LINE + 1):
                number += 1
                if len(text) > MAX_LINE:
                    raise TraceError(str(file), number, MAX_LINE, f"the line is longer than {MAX_LINE} characters")
                if text.strip():
                    yield Line(str(file), number, text.rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise TraceError(str(file), number + 1, 0, f"not UTF-8 text near here: {error.reason}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(str(file), number + 1, 0, f"can't be read: {error}") from None


def cells(line: Line, names: list[str]) -> list[Cell]:
    """Returns the cells of a CSV line. Raises TraceError unless there are as many cells as `names`."""
    row, column = [], 1
    texts = line.text.split(",")
    if len(texts) != len(names):
        raise line.error(0, f"expected {len(names)} fields, found {len(texts)}")
    for name, text in zip(names, texts, strict=True):
        row.append(Cell(line, column, text.strip(), name))
        column += len(text) + 1
    return row


def fields(line: Line) -> dict[str, Any]:
    """Returns the JSON object in the line. Raises TraceError."""
    try:
        value = json.loads(line.text)
    except json.JSONDecodeError as error:
        raise line.error(error.colno, f"not JSON: {error.msg}") from None
    except RecursionError:
        raise line.error(1, "JSON that is nested too deeply") from None
    except ValueError:
        raise line.error(1, "JSON with a number of thousands of digits") from None
    if not isinstance(value, dict):
        raise line.error(1, f"expected an object, found {type(value).__name__}")
    return value


def field(line: Line, entry: dict[str, Any], name: str, low: float, high: float) -> float:
    """Returns the number `name` in the line's JSON object `entry`, from `low` to `high`. Raises TraceError."""
    if name not in entry:
        raise line.error(1, f"{name} is missing")
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise line.error(column_of(line, name), f"{name}: expected {low:g} to {high:g}, found {str(value)[:40]!r}")
    return float(value)


def column_of(line: Line, name: str) -> int:
    """Returns the column (from 1) of a field's name in a JSON line.

    Returns 1 if the line does not have the field.
    """
    return max(1, line.text.find(f'"{name}"') + 1)


class TraceError(ValueError):
    """An error in a trace, at `line` and `column`.

    Both count from 1; `column` counts characters. Column 0 means the complete line.
    """

    def __init__(self, file: str, line: int, column: int, problem: str) -> None:
        super().__init__(f"{file}:{line}:{column}: {problem}" if column else f"{file}:{line}: {problem}")
        self.file, self.line, self.column, self.problem = file, line, column, problem
