"""A load generator for any server of OpenAI's /v1/completions: open loop by rate, closed loop by concurrency.

An open loop sends each request at its time whether or not others were answered, as many callers do who know nothing of
each other; a closed loop has a fixed number of callers, each of whom sends when its last request has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from benchmarks.common.latency import Sample

WORDS = (
    "the of and to in is was for on that with as by at from this be are have it not which but had they you one all "
    "were when there their what will can more if would who time some could other into its than been now over only new "
    "may like these after way also many back under first long two"
)
"""Words of a single token in the vocabularies of GPT-2, Llama 3, SmolLM2 and others."""
KEEP_ALIVE = 4.0
"""Seconds; many servers close idle connections after 5, and a request that meets that would fail for nothing."""
TIMEOUT = 300.0
"""Seconds for one whole request, unless another bound is given."""


Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    model: str
    prompt: Prompt


Call = Callable[[Planned], Awaitable[Sample]]
"""Sends one request and reports on it; whatever goes wrong with the request is in the report."""


def plan(models: Sequence[str], requests: int, prompt_tokens: int, seed: int) -> list[Planned]:
    """Returns requests to the models in turn. Each prompt is drawn, so that no server has it in a prefix cache."""
    rng, words = random.Random(seed), WORDS.split()
    return [Planned(models[i % len(models)], " ".join(rng.choices(words, k=prompt_tokens))) for i in range(requests)]


def poisson(rate: float, requests: int, seed: int) -> list[float]:
    """Seconds at which requests are due, the first after one drawn gap: gaps are exponential with mean 1 / rate."""
    rng, at, times = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += rng.expovariate(rate)
        times.append(at)
    return times


async def open_loop(call: Call, planned: Sequence[Planned], schedule: Sequence[float]) -> list[Sample]:
    """Sends each request at its time, in seconds from now, in order. Each sample says how late it was sent."""
    begin = time.perf_counter()
    calls: list[asyncio.Task[Sample]] = []
    async with asyncio.TaskGroup() as group:
        for request, at in zip(planned, schedule, strict=True):
            await asyncio.sleep(begin + at - time.perf_counter())
            calls.append(group.create_task(_at(call, request, begin + at)))
    return [task.result() for task in calls]


async def _at(call: Call, request: Planned, scheduled_at: float) -> Sample:
    sample = await call(request)
    sample.scheduled_at = scheduled_at
    return sample


async def closed_loop(call: Call, planned: Sequence[Planned], concurrency: int) -> list[Sample]:
    """Sends at most `concurrency` requests at once, in order. The samples are in the order of `planned`."""
    samples: dict[int, Sample] = {}
    remaining = iter(enumerate(planned))
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(_caller(call, remaining, samples))
    return [samples[i] for i in range(len(planned))]


async def _caller(call: Call, remaining: Iterator[tuple[int, Planned]], samples: dict[int, Sample]) -> None:
    for i, request in remaining:
        samples[i] = await call(request)


def check_url(url: str) -> str:
    """The base URL without a slash at its end. Raises ValueError where no request could be sent, or a key be shown."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// URL")
    if parts.username or parts.password:
        raise ValueError("the URL holds a user name or password, which the report would show; use a key file")
    if parts.query or parts.fragment:
        raise ValueError(f"{url!r} has a query or fragment; give the base URL, to which /v1/completions is added")
    return url.rstrip("/").removesuffix("/v1")


@asynccontextmanager
async def open_session(key: str | None = None, seconds: float = TIMEOUT) -> AsyncIterator[aiohttp.ClientSession]:
    """Connections without a limit of their own: a client that queued requests would hide what it measures."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = aiohttp.ClientTimeout(total=seconds)
    async with aiohttp.ClientSession(
        headers=headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
    ) as opened:
        yield opened


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class OpenAiServer:
    """A Call to one server. `max_tokens` are asked for, with end tokens ignored; greedy without a `temperature`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, max_tokens: int, temperature: float = 0) -> None:
        self._session, self._url, self._max_tokens = session, f"{url}/v1/completions", max_tokens
        self._temperature = temperature
        self._decoder = msgspec.json.Decoder(_Chunk)

    async def __call__(self, request: Planned) -> Sample:
        body = {
            "model": request.model, "prompt": request.prompt, "max_tokens": self._max_tokens,
            "temperature": self._temperature, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        sample = Sample(request.model, sent=time.perf_counter())
        await stream_events(self._session, self._url, body, sample, partial(self._add, sample))
        return sample

    def _add(self, sample: Sample, data: bytes, now: float) -> str | None:
        if data == b"[DONE]":
            return _incomplete(sample)
        chunk = self._decoder.decode(data)
        if chunk.error is not None:
            kind = chunk.error.get("type") if isinstance(chunk.error, dict) else None
            return f"in stream: {str(kind or 'unnamed')[:60]}"
        # A chunk that only ends a choice is no token, unless it is all that came: a first token without text.
        if any(choice.text or choice.finish_reason is None or not sample.times for choice in chunk.choices):
            sample.times.append(now)
        if chunk.usage is not None:
            sample.prompt_tokens, sample.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        return None


def _incomplete(sample: Sample) -> str:
    if not sample.output_tokens:
        return "no usage"
    return "" if sample.times else "no tokens"


async def stream_events(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    sample: Sample,
    add: Callable[[bytes, float], str | None],
) -> None:
    """Posts one request whose answer is a stream of events. `add` takes each event's data and when it came, and returns
    None until the answer has ended: then its error, or an empty text."""
    # A redirect would carry the key elsewhere, so it counts as an error.
    async with recorded(sample), session.post(url, json=body, allow_redirects=False) as reply:
        sample.cold_start = reply.headers.get("x-garnish-cold-start", "")
        sample.error = str(reply.status) if reply.status != 200 else await _read(reply.content, add)


async def _read(stream: aiohttp.StreamReader, add: Callable[[bytes, float], str | None]) -> str:
    async for line in stream:
        now = time.perf_counter()
        if line.startswith(b"data:") and (end := add(line[5:].strip(), now)) is not None:
            return end
    return "cut off"


async def read_events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """Yields the name and the data of each server-sent event."""
    event = ""
    async for line in stream:
        if line.startswith(b"event: "):
            event = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield event, line[6:]


@asynccontextmanager
async def recorded(sample: Sample) -> AsyncIterator[None]:
    """Notes the end of the request; failures of the connection and of what was read from it become its error."""
    try:
        yield
    except TimeoutError:
        sample.error = "timeout"
    except aiohttp.ClientPayloadError:
        sample.error = "cut off"
    except aiohttp.ClientError as error:
        sample.error = f"connection: {type(error).__name__}"
    except ValueError:  # not JSON, not of the shape, or a line without end
        sample.error = "malformed"
    finally:
        sample.end = time.perf_counter()
