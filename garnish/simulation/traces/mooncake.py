"""Mooncake: a JSON object per request with timestamp (ms), input_length and output_length; hash_ids are not used."""

from __future__ import annotations

from collections.abc import Iterator

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.build import Singles
from garnish.simulation.traces.laws import Laws
from garnish.simulation.traces.lines import MOST_TOKENS, Line, field, fields

MOST_TIME = 1e13


def is_mooncake(first: str) -> bool:
    return first.startswith("{") and '"input_length"' in first


def read_mooncake(lines: Iterator[Line], laws: Laws) -> list[TraceRequest]:
    """Returns the requests of a Mooncake trace, by ascending time; functions are drawn by `laws`. Raises TraceError."""
    requests = Singles()
    for line in lines:
        found = fields(line)
        seconds = field(line, found, "timestamp", 0, MOST_TIME) / 1e3
        prompt, output = (int(field(line, found, name, 0, MOST_TOKENS)) for name in ("input_length", "output_length"))
        requests.add(line, seconds, prompt, output)
    return requests.requests(laws)
