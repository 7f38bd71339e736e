"""Mooncake: a JSON object per request with timestamp (ms), input_length and output_length; hash_ids are not used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gateway.simulation.job import TraceRequest
from gateway.simulation.traces.build import single_requests
from gateway.simulation.traces.laws import Laws
from gateway.simulation.traces.lines import Line, field, fields

MOST_TOKENS = 10_000_000
MOST_TIME = 1e13


def is_mooncake(first: str) -> bool:
    return first.startswith("{") and '"input_length"' in first


def read_mooncake(lines: Iterator[Line], laws: Laws) -> list[TraceRequest]:
    """Raises TraceError."""
    times, prompts, outputs = list[float](), list[int](), list[int]()
    for line in lines:
        found = fields(line)
        times.append(field(line, found, "timestamp", 0, MOST_TIME) / 1e3)
        prompts.append(max(1, int(field(line, found, "input_length", 0, MOST_TOKENS))))
        outputs.append(max(1, int(field(line, found, "output_length", 0, MOST_TOKENS))))
    return single_requests(np.array(times), np.array(prompts), np.array(outputs), laws)
