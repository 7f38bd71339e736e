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
PROMPT_TOKENS = 8


async def decode_rows(
    services: Mapping[str, HttpService], function: int, vocabulary: int, alternations: int, tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Returns a row per alternation, service and number of callers, all of whom call one function with a prompt of
    their own. The first alternation, which brings the adapter to the device, has no rows."""
    draw, rows = Draw({}, vocabulary, seed), list[dict[str, Any]]()
    async with AsyncExitStack() as stack:
        calls = {
            name: Caller(await stack.enter_async_context(open_session(service.key)), service.url, [], max_tokens=tokens)
            for name, service in services.items()
        }
        for number in range(-1, alternations):
            for callers in CALLERS:
                planned = [Planned(f"a{function}", draw.prompt(PROMPT_TOKENS)) for _ in range(callers)]
                for name in draw.shuffled(list(calls)):
                    samples = await closed_loop(calls[name], planned, callers)
                    check(samples)
                    row = {"part": "d", "round": number, "way": name, "callers": callers}
                    rows += [row | {"tok_s": round(decoded(samples), 3)}] if number >= 0 else []
    return rows


def decoded(samples: list[Sample]) -> float:
    """Returns the callers' tokens/s behind their first tokens."""
    return sum(1 / tpot for sample in samples if (tpot := sample.tpot) is not None)
