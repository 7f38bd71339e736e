"""What is wrong with a trace, and where."""

from __future__ import annotations


class TraceError(ValueError):
    """What is wrong with a trace, and where: `line` and `column` count from 1; `column` is that of a character, 0 where
    the whole line is meant."""

    def __init__(self, file: str, line: int, column: int, problem: str) -> None:
        super().__init__(f"{file}:{line}:{column}: {problem}" if column else f"{file}:{line}: {problem}")
        self.file, self.line, self.column, self.problem = file, line, column, problem
