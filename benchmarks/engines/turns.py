"""Calls that each server gets in one round: by one caller and by several, and first calls of adapters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.common.invoke import check
from benchmarks.common.latency import Sample, summary
from benchmarks.common.load import Call, OpenAiServer, Planned, closed_loop, open_session, plan
from benchmarks.engines.servers import Server

ANSWER_S = 60.0
"""Maximum seconds for a server to answer again after a pause."""
SHORT_TOKENS = 2
BASE, ADAPTERS, AGAIN, FIRST = "base", "adapters", "again", "first"
"""Loads: calls of the base model; calls of the warm adapters; one call of each before them; calls of new adapters."""


@dataclass(frozen=True)
class Loads:
    warm: int
    """number of adapters that the timed loads call in turn"""
    first: int
    """number of adapters that are called for the first time in each round"""
    calls: int
    """number of calls by one caller"""
    callers: tuple[int, ...]
    """numbers of callers of the other loads"""
    per_caller: int
    prompt_words: int
    tokens: int

    def adapters(self, rounds: int) -> int:
        """Returns the number of adapters that a server needs."""
        return self.warm + rounds * self.first


@dataclass(frozen=True)
class Load:
    """Calls of one kind: `calls` of the functions in turn, at most `callers` at once."""

    name: str
    functions: Sequence[str]
    """names; empty: the base model"""
    calls: int
    callers: int
    tokens: int


def loads_of_round(loads: Loads, number: int) -> list[Load]:
    """Returns the loads of round `number` in order. The first one brings the warm adapters back to the device."""
    warm = [f"a{(at + number * loads.calls) % loads.warm}" for at in range(loads.warm)]
    new = [f"a{loads.warm + number * loads.first + at}" for at in range(loads.first)]
    planned = [Load(AGAIN, warm, loads.warm, 1, SHORT_TOKENS)]
    for callers, calls in ((1, loads.calls), *((each, each * loads.per_caller) for each in loads.callers)):
        planned += [
            Load(BASE, (), calls, callers, loads.tokens), Load(ADAPTERS, warm, calls, callers, loads.tokens)
        ]  # fmt: skip
    return [*planned, Load(FIRST, new, loads.first, 1, SHORT_TOKENS)]


async def measure(server: Server, load: Load, prompt_words: int, seed: int) -> dict[str, Any]:
    """Returns the row of a load. Servers get the same prompts with the same seed. Raises RuntimeError if a call
    fails."""
    async with open_session(server.key or None) as session:
        await until_answered(OpenAiServer(session, server.url, SHORT_TOKENS), server.base)
        planned = plan(load.functions or [server.base], load.calls, prompt_words, seed)
        samples = await closed_loop(OpenAiServer(session, server.url, load.tokens), planned, load.callers)
    check(samples)
    return {"load": load.name, "callers": load.callers, **measured(samples)}


async def until_answered(call: Call, model: str) -> None:
    """Calls the model until a call succeeds. Raises TimeoutError."""
    deadline = time.monotonic() + ANSWER_S
    while (sample := await call(Planned(model, "the"))).error:
        if time.monotonic() > deadline:
            raise TimeoutError(f"a call of {model} ends with {sample.error}")
        await asyncio.sleep(0.5)


async def call_each(server: Server, loads: Loads) -> None:
    """Calls each warm adapter once. Raises RuntimeError if a call fails."""
    async with open_session(server.key or None) as session:
        short = OpenAiServer(session, server.url, SHORT_TOKENS)
        await until_answered(short, server.base)
        models = [f"a{at}" for at in range(loads.warm)]
        check(await closed_loop(short, plan(models, loads.warm, loads.prompt_words, 0), 1))


def measured(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the columns of a load. `by_state`: first tokens in ms by the adapter's tier, where the server says it."""
    of = summary(samples)
    by_state = Counter(sample.cold_start for sample in samples if sample.cold_start)
    return {
        **{name: of[name] for name in ("seconds", "tok_s", "prompt_tokens", "output_tokens")},
        "tpot_p50_ms": of.get("tpot_p50_ms"),
        "ttft_ms": [round(sample.ttft * 1e3, 2) for sample in samples],
        "ttft_p50_ms": median(sample.ttft for sample in samples) * 1e3,
        "by_state": {
            state: [round(each.ttft * 1e3, 2) for each in samples if each.cold_start == state] for state in by_state
        },
    }
