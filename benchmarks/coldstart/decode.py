"""Part d of benchmarks/coldstart/default.py: decoding alone, where nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from benchmarks.coldstart.calls import Draw
from benchmarks.common.http_service import HttpService
from benchmarks.common.invoke import Caller, check
from benchmarks.common.latency import Sample
from benchmarks.common.load import Planned, closed_loop, open_session

CALLERS = (1, 8)
WORKERS, NONE, AGAIN = "workers", "none", "again"
"""Services with CPU workers and without them; AGAIN is another one like NONE."""
DECODE_WAYS = (WORKERS, NONE, AGAIN)
PROMPT_TOKENS = 8


async def decode_rows(
    services: Mapping[str, HttpService], function: int, vocabulary: int, numbers: range, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Returns a row per alternation in `numbers`, service and number of callers, all of whom call one function with a
    prompt of their own. One alternation precedes them, which brings the adapter to the device and has no rows."""
    draw, rows = Draw({}, vocabulary, seed), list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        calls = {
            name: Caller(await stack.enter_async_context(open_session(service.key)), service.url, [], max_tokens=tokens)
            for name, service in services.items()
        }
        for number in (None, *numbers):
            for callers in CALLERS:
                planned = [Planned(f"a{function}", draw.prompt(PROMPT_TOKENS)) for _ in range(callers)]
                for name in draw.shuffled(list(calls)):
                    samples = await closed_loop(calls[name], planned, callers)
                    check(samples)
                    row = {"part": "d", "round": number, "way": name, "callers": callers}
                    rows += [row | {"tok_s": round(decoded(samples), 3)}] if number is not None else []
    return rows


def decoded(samples: list[Sample]) -> float:
    """Returns the callers' tokens/s behind their first tokens."""
    return sum(1 / tpot for sample in samples if (tpot := sample.tpot) is not None)
