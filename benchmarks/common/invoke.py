"""A caller of /invoke that keeps what each answer says of itself, and prompts for it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp, log
from statistics import NormalDist
from typing import Any

import aiohttp
import msgspec

from benchmarks.common.http_service import HttpService
from benchmarks.common.latency import Sample
from benchmarks.common.load import WORDS, Planned, Prompt, open_session, stream_events

PROMPTS = 4
MEASURING_LIMIT_S = 900


@dataclass
class Answer(Sample):
    """The answer to a call. `gaps`: between the two best log probabilities of each token, if they were asked for."""

    prompt: int = 0
    text: str = ""
    tokens: list[int | None] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    state: str = ""
    """where the adapter was: none (on the device), host, disk or absent"""
    plan: str = ""
    exposed_s: float = 0.0
    forecast_s: float = 0.0
    load_s: float = 0.0
    """0 if the adapter was not complete on the device when the request ended"""
    layers_cpu: int = 0
    layers_device: int = 0
    """layers of the prompt computed before the whole adapter was there, by where"""
    cached_tokens: int = 0
    """prompt tokens that an earlier call had left computed"""


def prompt_lengths(max_words: int) -> list[int]:
    """Returns the words of each prompt, at most `max_words`: the middles of equal parts of short chat's law.

    The law is log-normal, with 90 % of prompts at most 256 tokens and 99 % at most 1,024.
    """
    low, high = NormalDist().inv_cdf(0.9), NormalDist().inv_cdf(0.99)
    sigma = log(1024 / 256) / (high - low)
    law = NormalDist(log(256) - low * sigma, sigma)
    return [min(max_words, round(exp(law.inv_cdf((i + 0.5) / PROMPTS)))) for i in range(PROMPTS)]


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
        _record_cold_start(answer, event.timing.cold_start)
        return "" if answer.output_tokens == self._max_tokens and answer.times else "too few tokens"


def _record_cold_start(answer: Answer, cold: _ColdStart) -> None:
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


def check(samples: Iterable[Sample]) -> None:
    """Raises RuntimeError unless every call was answered whole."""
    for sample in samples:
        if sample.error:
            raise RuntimeError(f"a call of {sample.model} ended with {sample.error}")


async def until_measured(service: HttpService) -> None:
    """Waits until the node has measured its costs, which it does where it is idle. Raises TimeoutError."""
    async with open_session(service.admin_key) as session:
        for _ in range(MEASURING_LIMIT_S):
            if (await node_record(session, service.url)).get("measuring") is None:
                return
            await asyncio.sleep(1)
    raise TimeoutError("the node does not end measuring itself")


async def node_record(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/nodes", raise_for_status=True) as reply:
        (node,) = (await reply.json())["nodes"]
    record: dict[str, Any] = node["record"]
    return record
