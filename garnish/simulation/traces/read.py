"""Readers for traces, in the formats of other systems and in that of `garnish logs --trace`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np

from garnish.simulation.job import TraceRequest
from garnish.simulation.traces.lines import (
    MAX_TOKENS,
    Cell,
    Line,
    TraceError,
    cells,
    column_of,
    field,
    fields,
    read_lines,
)
from garnish.simulation.traces.requests import (
    MAX_REQUESTS,
    Singles,
    TraceOptions,
    arrivals,
    chat_prompts,
    outputs,
    requests_from_columns,
)

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MAF_COLUMNS = ("HashOwner", "HashApp", "HashFunction", "Trigger")
MAX_COUNT = 10_000_000
SERVEGEN_COLUMNS = ["client_id", "timestamp_s", "rate_rps", "cv", "pattern", "param1", "param2"]
WINDOW = 600.0
PATTERNS = ("", "Gamma", "Weibull", "Exponential")
OWN_FIELDS = frozenset(TraceRequest.__struct_fields__)


def read_trace(file: Path, options: TraceOptions) -> tuple[str, list[TraceRequest]]:
    """Returns the name of the file's format, and the requests by ascending time. Raises TraceError."""
    lines = read_lines(file)
    first = next(lines, None)
    if first is None:
        raise TraceError(str(file), 1, 0, "the trace is empty")
    for name, (is_it, read) in FORMATS.items():
        if is_it(first.text.lstrip("\ufeff")):
            requests = read(chain([first], lines), options)
            if not requests:
                raise TraceError(str(file), first.number, 0, "the trace holds no requests")
            return name, requests
    known_formats = "a MAF, Azure LLM or ServeGen header, or JSON lines of Mooncake or `garnish logs --trace`"
    raise TraceError(str(file), first.number, 1, f"the format is not known; expected {known_formats}")


def read_azure_llm(lines: Iterator[Line], options: TraceOptions) -> list[TraceRequest]:
    """Returns the requests of an Azure LLM inference trace (2023 or 2024), which has a row per request.

    Raises TraceError.
    """
    next(lines)
    requests = Singles()
    for line in lines:
        when, prompt, output = cells(line, AZURE_COLUMNS)
        requests.add(line, _seconds(when), prompt.number(int, 0, MAX_TOKENS), output.number(int, 0, MAX_TOKENS))
    return requests.requests(options)


def _seconds(cell: Cell) -> float:
    """Returns the cell's time as Unix time. Raises TraceError.

    The fraction of a second is parsed separately, since it has seven digits and Python parses only six.
    """
    try:
        text, _, fraction = cell.text.partition(".")
        second = datetime.fromisoformat(text)
        return second.replace(tzinfo=second.tzinfo or UTC).timestamp() + float(f"0.{fraction[:7].rstrip('Z') or 0}")
    except ValueError:
        raise cell.error(f"expected a time such as 2023-11-16 18:15:46.6805900, found {cell.text[:40]!r}") from None


def read_maf(lines: Iterator[Line], options: TraceOptions) -> list[TraceRequest]:
    """Returns the requests of an Azure Functions 2019 trace (MAF).

    It has a row per function, with a column per minute that contains the number of invocations. Within a minute the
    times are drawn independently and uniformly (Poisson arrivals, given their number). Raises TraceError.
    """
    counts, owners, last = _counts(lines)
    busiest = np.argsort(-counts.sum(axis=1), kind="stable")[options.skip_top :]
    busiest = busiest if options.half is None else busiest[options.half :: 2]
    if not len(busiest):
        raise TraceError(last.file, last.number, 0, f"no function is left without the {options.skip_top} busiest")
    counts, owners = counts[busiest], owners[busiest]
    rng = np.random.default_rng((options.seed, 0))
    if options.functions is not None:
        drawn = rng.integers(0, len(counts), options.functions)
        counts, owners = counts[drawn], np.arange(options.functions) % max(1, len(np.unique(owners)))
    columns = counts.shape[1]
    taken_minutes = columns if options.seconds is None else min(columns, max(1, int(-(-options.seconds // 60))))
    if options.shifted:
        begins = rng.integers(0, columns, len(counts))
        counts = np.take_along_axis(counts, (begins[:, None] + np.arange(taken_minutes)) % columns, axis=1)
    counts = counts[:, :taken_minutes]
    total = counts.sum()
    if options.rate is not None and total:
        counts = rng.poisson(counts * (options.rate * 60 * counts.shape[1] / total))
        total = counts.sum()
    if total > MAX_REQUESTS:
        raise TraceError(last.file, last.number, 0, f"{total} requests are too many: take fewer seconds, or a rate")
    functions, minutes = np.nonzero(counts)
    times = counts[functions, minutes]
    at = (np.repeat(minutes, times) + rng.random(int(times.sum()))) * 60
    order, at = arrivals(at, options)
    return _with_lengths(at, np.repeat(functions, times)[order], owners, options, rng)


def _counts(lines: Iterator[Line]) -> tuple[np.ndarray, np.ndarray, Line]:
    """Returns (calls, owners, last line).

    calls i64[functions, minutes] are numbers of calls; owners i64[functions] are indices of owners. Raises TraceError.
    """
    line = next(lines)
    names = line.text.split(",")
    if len(names) == len(MAF_COLUMNS):
        raise line.error(len(line.text), "no minute is named after the trigger")
    rows_, owners, owner_numbers = list[list[int]](), list[int](), dict[str, int]()
    for line in lines:
        row = cells(line, names)
        owners.append(owner_numbers.setdefault(row[0].text, len(owner_numbers)))
        rows_.append([0 if cell.text == "0" else cell.number(int, 0, MAX_COUNT) for cell in row[len(MAF_COLUMNS) :]])
    if not rows_:
        raise line.error(0, "the trace has a header and no function")
    return np.array(rows_, np.int64), np.array(owners, np.int64), line


def read_mooncake(lines: Iterator[Line], options: TraceOptions) -> list[TraceRequest]:
    """Returns the requests of a Mooncake trace, which has a JSON object per request.

    `hash_ids` are not used. Raises TraceError.
    """
    requests = Singles()
    for line in lines:
        entry = fields(line)
        seconds = field(line, entry, "timestamp", 0, 1e13) / 1e3
        prompt, output = (int(field(line, entry, name, 0, MAX_TOKENS)) for name in ("input_length", "output_length"))
        requests.add(line, seconds, prompt, output)
    return requests.requests(options)


def read_own(lines: Iterator[Line], options: TraceOptions) -> list[TraceRequest]:
    """Returns the requests of a trace from `garnish logs --trace`, which has a JSON object per request:

        {"at": 12.5, "tenant": "t1", "function": "3f0c…", "rank": 16, "prompt_tokens": 40, "output_tokens": 96}

    `at` is seconds since the first request. Tenants and functions are opaque names; an empty function is the base
    model. `bytes`, the size of the adapter, is optional. Of the options only `rate` and `seconds` are used. Raises
    TraceError.
    """
    requests, names = list[TraceRequest](), dict[str, str]()
    for line in lines:
        if len(requests) == MAX_REQUESTS:
            raise line.error(0, f"more than {MAX_REQUESTS} requests")
        requests.append(_request(line, names))
    requests.sort(key=lambda request: (request.at, request.function))
    if options.rate is not None and requests[-1].at > 0:
        stretch = len(requests) / requests[-1].at / options.rate
        requests = [msgspec.structs.replace(request, at=request.at * stretch) for request in requests]
    return [request for request in requests if options.seconds is None or request.at < options.seconds]


def _request(line: Line, names: dict[str, str]) -> TraceRequest:
    """Returns the request in the line. Raises TraceError.

    To save memory, all requests of a tenant or function share one string. `names` has these strings.
    """
    entry = fields(line)
    for name in entry.keys() - OWN_FIELDS:
        raise line.error(column_of(line, name), f"{name}: this field is not known")
    for name in ("tenant", "function"):
        if not isinstance(entry.get(name, ""), str):
            raise line.error(column_of(line, name), f"{name}: expected text")
    function, tenant = entry.get("function", ""), entry.get("tenant", "")
    return TraceRequest(
        at=field(line, entry, "at", 0, 1e10),
        function=names.setdefault(function, function),
        rank=int(field(line, entry, "rank", 0, 1 << 16)),
        prompt_tokens=int(field(line, entry, "prompt_tokens", 1, MAX_TOKENS)),
        output_tokens=int(field(line, entry, "output_tokens", 1, MAX_TOKENS)),
        tenant=names.setdefault(tenant, tenant),
        bytes=int(field(line, entry, "bytes", 0, 1 << 50)) if "bytes" in entry else 0,
    )


def read_servegen(lines: Iterator[Line], options: TraceOptions) -> list[TraceRequest]:
    """Returns the requests of a ServeGen trace, which has a row per client and window of 600 s.

    Each client becomes a function of a separate tenant. A window has rate * 600 requests, rounded. Gaps between them
    are drawn from the window's distribution (Gamma or Weibull with shape param1, else exponential), and scaled to fill
    the window. Raises TraceError.
    """
    line = next(lines)
    rng, clients = np.random.default_rng((options.seed, 0)), dict[str, int]()
    times, called = list[np.ndarray](), list[np.ndarray]()
    total = 0
    for line in lines:
        client, begin, rate, _, pattern, shape, _ = cells(line, SERVEGEN_COLUMNS)
        start, per_second = begin.number(float, 0, 1e10), rate.number(float, 0, 1e6)
        if pattern.text not in PATTERNS:
            raise pattern.error(f"expected Gamma, Weibull, Exponential or nothing, found {pattern.text[:40]!r}")
        number = clients.setdefault(client.text, len(clients))
        count = round(per_second * WINDOW)
        total += count
        if total > MAX_REQUESTS:
            raise TraceError(line.file, line.number, 0, "too many requests up to here: take fewer seconds")
        if not count or (options.seconds is not None and options.rate is None and start >= options.seconds):
            continue
        min_shape = 0.02 if pattern.text in ("Gamma", "Weibull") else 0.0
        times.append(start + _within(count, pattern.text, shape.number(float, min_shape, 1e6), rng))
        called.append(np.full(count, number, np.int64))
    if not times:
        raise TraceError(line.file, line.number, 0, "no client sends anything")
    order, at = arrivals(np.concatenate(times), options, options.rate)
    return _with_lengths(at, np.concatenate(called)[order], np.arange(len(clients)), options, rng)


def _within(count: int, pattern: str, shape: float, rng: np.random.Generator) -> np.ndarray:
    """Returns drawn times of a window's `count` requests: f64[count], seconds since the window's start, ascending.

    `pattern` and `shape` are the distribution of the gaps and its shape parameter.
    """
    if pattern == "Gamma":
        gaps = rng.gamma(shape, size=count + 1)
    elif pattern == "Weibull":
        gaps = rng.weibull(shape, size=count + 1)
    else:
        gaps = rng.exponential(size=count + 1)
    passed = np.cumsum(gaps)
    inside: np.ndarray = passed[:-1] / max(passed[-1], 1e-300) * WINDOW
    return inside


def _with_lengths(
    at: np.ndarray, called: np.ndarray, owners: np.ndarray, options: TraceOptions, rng: np.random.Generator
) -> list[TraceRequest]:
    """Returns requests with drawn prompt and output lengths, for traces that do not state them."""
    return requests_from_columns(
        at, called, owners, chat_prompts(len(at), rng), outputs(len(at), options.mean_output, rng), options
    )


Reader = Callable[[Iterator[Line], TraceOptions], list[TraceRequest]]
FORMATS: dict[str, tuple[Callable[[str], bool], Reader]] = {
    "maf": (lambda first: first.startswith(",".join(MAF_COLUMNS[:3])), read_maf),
    "azure_llm": (lambda first: first.split(",") == AZURE_COLUMNS, read_azure_llm),
    "mooncake": (lambda first: first.startswith("{") and '"input_length"' in first, read_mooncake),
    "servegen": (lambda first: first.split(",") == SERVEGEN_COLUMNS, read_servegen),
    "garnish": (lambda first: first.startswith("{") and '"at"' in first, read_own),
}
"""Formats by name, each with a test of the trace's first line and with its reader."""
