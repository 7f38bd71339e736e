"""Reads a trace of any known format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.azure_llm import is_azure_llm, read_azure_llm
from garnish.simulation.traces.errors import TraceError
from garnish.simulation.traces.laws import Laws
from garnish.simulation.traces.lines import Line, read_lines
from garnish.simulation.traces.maf import is_maf, read_maf
from garnish.simulation.traces.mooncake import is_mooncake, read_mooncake
from garnish.simulation.traces.own import is_own, read_own
from garnish.simulation.traces.servegen import is_servegen, read_servegen

Reader = Callable[[Iterator[Line], Laws], list[TraceRequest]]
FORMATS: dict[str, tuple[Callable[[str], bool], Reader]] = {
    "maf": (is_maf, read_maf),
    "azure_llm": (is_azure_llm, read_azure_llm),
    "mooncake": (is_mooncake, read_mooncake),
    "servegen": (is_servegen, read_servegen),
    "garnish": (is_own, read_own),
}
"""Told apart by the first line."""


def read_trace(file: Path, laws: Laws) -> tuple[str, list[TraceRequest]]:
    """Returns the format's name, and the requests by ascending time. Raises TraceError."""
    lines = read_lines(file)
    first = next(lines, None)
    if first is None:
        raise TraceError(str(file), 1, 0, "the trace is empty")
    for name, (is_it, read) in FORMATS.items():
        if is_it(first.text.lstrip("\ufeff")):
            found = read(chain([first], lines), laws)
            if not found:
                raise TraceError(str(file), first.number, 0, "the trace holds no requests")
            return name, found
    known = "a MAF, Azure LLM or ServeGen header, or JSON lines of Mooncake or `garnish logs --trace`"
    raise TraceError(str(file), first.number, 1, f"the format is not known; expected {known}")
