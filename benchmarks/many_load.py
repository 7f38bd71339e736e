"""Who calls which adapter with which prompt and when, for benchmarks/many.py; a client that notes what came back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, log
from statistics import NormalDist
from typing import Any

import aiohttp
import msgspec
import numpy as np

from benchmarks.latency import Sample
from benchmarks.load import WORDS, Planned, Prompt, stream_events
from benchmarks.trace import minute_counts

WITHOUT_TOP = 10
"""Busiest functions of the trace that are left out: they make nine tenths of its calls."""
PROMPTS = 4
ORACLE_LEADS_S = (2.0, 0.5)
"""Before each call, at which the oracle's orders are sent; the second is for adapters that have left again."""
ORACLE_AT_ONCE = 12
"""Orders under way; a node takes 16."""


@dataclass(frozen=True)
class Arrival:
    at: float
    """in units of the mean gap between calls: multiply by it"""
    adapter: int
    prompt: int


@dataclass(frozen=True)
class Window:
    """A stretch of the trace."""

    arrivals: list[Arrival]
    seconds: float
    """that it takes in the trace"""


@dataclass
class Answer(Sample):
    """What came back. `gaps`: between the two best log probabilities of each token, where they were asked for."""

    prompt: int = 0
    text: str = ""
    tokens: list[int | None] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    state: str = ""
    """where the adapter was: none (on the device), host, disk or absent"""
    plan: str = ""
    """cold start plan: none, wait, pipeline or assist"""
    exposed_s: float = 0.0
    forecast_s: float = 0.0
    """forecast of `exposed_s`"""
    load_s: float = 0.0
    """0: the adapter was not whole on the device when the request ended"""
    layers_cpu: int = 0
    layers_device: int = 0
    """layers of the prompt computed before the whole adapter was there, by where"""
    cached_tokens: int = 0
    """of the prompt, which an earlier call had left computed"""


def draw_window(adapters: int, calls: int, seed: int) -> Window:
    """The first `calls` calls behind a drawn minute of the trace, without its busiest functions.

    Adapters are functions drawn at random; those beyond the trace's functions repeat them, shifted in time by a drawn
    number of minutes. Within its minute each call's time is drawn uniformly.
    """
    rng = np.random.default_rng([seed, adapters])
    counts = minute_counts(without_top=WITHOUT_TOP)
    functions, minutes = counts.shape
    chosen = np.concatenate([rng.permutation(functions) for _ in range(-(-adapters // functions))])[:adapters]
    shifts = np.where(np.arange(adapters) < functions, 0, rng.integers(1, minutes, adapters))
    begin = int(rng.integers(minutes))
    column = (np.arange(minutes)[None, :] + begin + shifts[:, None]) % minutes
    window = counts[chosen[:, None], column]
    until = int(np.searchsorted(window.sum(axis=0).cumsum(), calls)) + 1
    adapter, minute = np.nonzero(window[:, :until])
    times = window[adapter, minute]
    adapter, minute = np.repeat(adapter, times), np.repeat(minute, times)
    at = minute + rng.random(len(minute))
    order = np.argsort(at)[:calls]
    if len(order) < calls:
        raise ValueError(f"{adapters} functions have {len(order)} calls in the whole trace, not {calls}")
    span = float(at[order[-1]])
    prompts = rng.integers(PROMPTS, size=calls)
    arrivals = [
        Arrival(float(at[i]) / span * calls, int(adapter[i]), int(prompt))
        for i, prompt in zip(order, prompts, strict=True)
    ]
    return Window(arrivals, span * 60)


def prompt_lengths(most: int) -> list[int]:
    """Words of the prompts, at most `most`: the middles of equal parts of short chat's law (90 % of prompts at most 256
    tokens, 99 % at most 1,024, log-normal)."""
    low, high = NormalDist().inv_cdf(0.9), NormalDist().inv_cdf(0.99)
    sigma = log(1024 / 256) / (high - low)
    law = NormalDist(log(256) - low * sigma, sigma)
    return [min(most, round(exp(law.inv_cdf((i + 0.5) / PROMPTS)))) for i in range(PROMPTS)]


def make_prompt(words: int, seed: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS.split(), k=words))


class _Top(msgspec.Struct):
    logprob: float


class _Logprob(msgspec.Struct):
    top: list[_Top]


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class _ColdStart(msgspec.Struct):
    state: str
    exposed_ms: float
    plan: str = ""
    forecast_ms: float = 0.0
    load_ms: float = 0.0
    layers_cpu: int = 0
    layers_device: int = 0


class _Timing(msgspec.Struct):
    cold_start: _ColdStart


class _Event(msgspec.Struct):
    text: str = ""
    token_id: int | None = None
    logprob: _Logprob | None = None
    usage: _Usage | None = None
    timing: _Timing | None = None
    error: Any = None


class Caller:
    """A Call of `/invoke`, greedy, end tokens ignored; its samples are Answers. `alternatives`: log probabilities that
    are asked for with each token."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        prompts: Sequence[str],
        *,
        max_tokens: int,
        alternatives: int | None = None,
    ) -> None:
        self._session, self._url, self._max_tokens = session, url, max_tokens
        self._number: dict[Prompt, int] = {prompt: i for i, prompt in enumerate(prompts)}
        self._alternatives = {} if alternatives is None else {"logprobs": alternatives}
        self._decoder = msgspec.json.Decoder(_Event)

    async def __call__(self, request: Planned) -> Answer:
        body = {
            "prompt": request.prompt, "max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, **self._alternatives,
        }  # fmt: skip
        answer = Answer(request.model, sent=time.perf_counter(), prompt=self._number.get(request.prompt, -1))
        url = f"{self._url}/invoke/{request.model}"
        await stream_events(self._session, url, body, answer, partial(self._add, answer))
        return answer

    def _add(self, answer: Answer, data: bytes, now: float) -> str | None:
        event = self._decoder.decode(data)
        if event.error is not None:
            return "in stream"
        if event.usage is None or event.timing is None:
            _add_token(answer, event, now)
            return None
        answer.prompt_tokens, answer.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        answer.cached_tokens = event.usage.cached_tokens
        _note(answer, event.timing.cold_start)
        return "" if answer.output_tokens == self._max_tokens and answer.times else "too few tokens"


def _note(answer: Answer, cold: _ColdStart) -> None:
    answer.state, answer.plan = cold.state, cold.plan
    answer.layers_cpu, answer.layers_device = cold.layers_cpu, cold.layers_device
    answer.exposed_s, answer.forecast_s = cold.exposed_ms / 1e3, cold.forecast_ms / 1e3
    answer.load_s = cold.load_ms / 1e3


def _add_token(answer: Answer, event: _Event, now: float) -> None:
    answer.times.append(now)
    answer.text += event.text
    answer.tokens.append(event.token_id)
    if event.logprob is not None and len(event.logprob.top) > 1:
        answer.gaps.append(event.logprob.top[0].logprob - event.logprob.top[1].logprob)


@dataclass
class Oracle:
    """Orders a node to bring in each adapter shortly before its call. `orders` has the statuses of the answers."""

    session: aiohttp.ClientSession
    """with an operator's key"""
    url: str
    """of the node's prefetches, at the gateway"""
    orders: dict[int, int] = field(default_factory=dict)

    async def tell(self, calls: Sequence[tuple[float, str]]) -> None:
        """`calls`: seconds from now, ascending, and functions. Ends with the last order's answer."""
        begin, places = time.perf_counter(), asyncio.Semaphore(ORACLE_AT_ONCE)
        due = sorted((max(0.0, at - lead), name) for at, name in calls for lead in ORACLE_LEADS_S)
        async with asyncio.TaskGroup() as group:
            for at, name in due:
                await asyncio.sleep(begin + at - time.perf_counter())
                group.create_task(self.bring(name, places))

    async def bring(self, name: str, places: asyncio.Semaphore) -> str | None:
        """Returns where the function's adapter is then; None if it is still on its way after 10 s, or was refused."""
        async with places, self.session.post(self.url, json={"function": name}) as reply:
            self.orders[reply.status] = self.orders.get(reply.status, 0) + 1
            tier: str | None = (await reply.json()).get("tier")
            return tier
