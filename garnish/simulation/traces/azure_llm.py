"""Azure LLM inference 2023 and 2024: TIMESTAMP,ContextTokens,GeneratedTokens, a row per request."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.build import Singles
from garnish.simulation.traces.laws import Laws
from garnish.simulation.traces.lines import MOST_TOKENS, Cell, Line, cells

NAMES = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def is_azure_llm(header: str) -> bool:
    return header.split(",") == NAMES


def read_azure_llm(lines: Iterator[Line], laws: Laws) -> list[TraceRequest]:
    """Reads a trace of Azure's LLM inference. Raises TraceError."""
    next(lines)
    found = Singles()
    for line in lines:
        when, prompt, output = cells(line, NAMES)
        found.add(line, _seconds(when), prompt.number(int, 0, MOST_TOKENS), output.number(int, 0, MOST_TOKENS))
    return found.requests(laws)


def _seconds(cell: Cell) -> float:
    """Returns the cell's time as Unix time. Python reads six digits of a second, and the trace has seven, so the
    fraction is read by itself. Raises TraceError."""
    try:
        whole, _, fraction = cell.text.partition(".")
        begun = datetime.fromisoformat(whole)
        return begun.replace(tzinfo=begun.tzinfo or UTC).timestamp() + float(f"0.{fraction[:7].rstrip('Z') or 0}")
    except ValueError:
        raise cell.error(f"expected a time such as 2023-11-16 18:15:46.6805900, found {cell.text[:40]!r}") from None
