"""What `garnish logs --trace` writes: a JSON object per request.

    {"at": 12.5, "tenant": "t1", "function": "3f0c…", "rank": 16, "prompt_tokens": 40, "output_tokens": 96}

`at` is seconds since the first request. Tenants and functions are opaque; an empty function is the base alone. `bytes`
(of the adapter) may be left out. Times and lengths are taken as they are; only `rate` and `seconds` of the laws count.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.build import MAX_REQUESTS
from garnish.simulation.traces.laws import Laws
from garnish.simulation.traces.lines import MOST_TOKENS, Line, column_of, field, fields

NAMES = frozenset(TraceRequest.__struct_fields__)


def is_own(first: str) -> bool:
    return first.startswith("{") and '"at"' in first


def read_own(lines: Iterator[Line], laws: Laws) -> list[TraceRequest]:
    """Reads a trace that `garnish logs --trace` wrote. Raises TraceError."""
    found, names = list[TraceRequest](), dict[str, str]()
    for line in lines:
        if len(found) == MAX_REQUESTS:
            raise line.error(0, f"more than {MAX_REQUESTS} requests")
        found.append(_request(line, names))
    found.sort(key=lambda request: (request.at, request.function))
    if laws.rate is not None and found[-1].at > 0:
        stretch = len(found) / found[-1].at / laws.rate
        found = [msgspec.structs.replace(request, at=request.at * stretch) for request in found]
    return [request for request in found if laws.seconds is None or request.at < laws.seconds]


def _request(line: Line, names: dict[str, str]) -> TraceRequest:
    """Returns the request in the line. `names` keeps one text for each tenant and function, which all their requests
    share. Raises TraceError."""
    found = fields(line)
    for name in found.keys() - NAMES:
        raise line.error(column_of(line, name), f"{name}: this field is not known")
    for name in ("tenant", "function"):
        if not isinstance(found.get(name, ""), str):
            raise line.error(column_of(line, name), f"{name}: expected text")
    function, tenant = found.get("function", ""), found.get("tenant", "")
    return TraceRequest(
        at=field(line, found, "at", 0, 1e10),
        function=names.setdefault(function, function),
        rank=int(field(line, found, "rank", 0, 1 << 16)),
        prompt_tokens=int(field(line, found, "prompt_tokens", 1, MOST_TOKENS)),
        output_tokens=int(field(line, found, "output_tokens", 1, MOST_TOKENS)),
        tenant=names.setdefault(tenant, tenant),
        bytes=int(field(line, found, "bytes", 0, 1 << 50)) if "bytes" in found else 0,
    )
