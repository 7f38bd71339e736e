"""Calls of benchmarks/coldstart/default.py: the same ones for every service, in a drawn order, and what is kept."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import astuple, dataclass, fields
from typing import Any, get_type_hints

from benchmarks.coldstart.services import Residency, until_idle
from benchmarks.common.http_service import HttpService
from benchmarks.common.invoke import Answer, Caller, check
from benchmarks.common.load import Planned, closed_loop, open_session

CACHED = "cached"
"""Mode whose adapters are on the device when a call is timed."""
WARMING_CALLS = 3
"""Calls after which the adapter of a CACHED call must be on the device, at most."""
FIRST_ID, LAST_ID = 100, 1000
"""Ids of tokens in drawn prompts, as far as the vocabulary goes."""


@dataclass(frozen=True)
class Column:
    """Cold calls of one kind."""

    setting: str
    """the papers' setting: S1 or S3"""
    rank: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.setting}_t{self.tokens}"


@dataclass(frozen=True)
class ReportedCall:
    """A call as it is reported. `state`: where the adapter was; times in ms."""

    round: int
    adapter: int
    state: str
    plan: str
    layers_cpu: int
    layers_device: int
    exposed: float
    forecast: float
    ttft: float
    e2e: float

    def text(self) -> str:
        return " ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in astuple(self))


CALL_COLUMNS = " ".join(field.name for field in fields(ReportedCall))
_TYPES = tuple(get_type_hints(ReportedCall)[field.name] for field in fields(ReportedCall))


def parse_call(text: str) -> ReportedCall:
    """Reads what ReportedCall.text wrote."""
    return ReportedCall(*(kind(value) for value, kind in zip(text.split(), _TYPES, strict=True)))


def report_call(number: int, answer: Answer) -> ReportedCall:
    return ReportedCall(
        number, int(answer.model[1:]), answer.state, answer.plan, answer.layers_cpu, answer.layers_device,
        answer.exposed_s * 1e3, answer.forecast_s * 1e3, answer.ttft * 1e3, answer.e2e * 1e3,
    )  # fmt: skip


class Draw:
    """Adapters, those first that were called longest ago; prompts and orders, drawn."""

    def __init__(self, of_rank: Mapping[int, Sequence[int]], vocabulary: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._turns = {rank: deque(numbers) for rank, numbers in of_rank.items()}
        self._ids = range(min(FIRST_ID, vocabulary // 2), min(LAST_ID, vocabulary))

    def calls(self, column: Column, count: int, cold: Container[int]) -> list[Planned]:
        """Returns calls of the next adapters that are in `cold`; of others where these are too few."""
        queue = self._turns[column.rank]
        numbers = [queue.popleft() for _ in range(len(queue))]
        chosen = sorted(numbers, key=lambda number: number not in cold)[:count]
        queue.extend([number for number in numbers if number not in chosen] + chosen)
        return [Planned(f"a{number}", self.prompt(column.tokens)) for number in chosen]

    def prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(self._ids, k=tokens))

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        return self._rng.sample(items, len(items))


async def rounds(
    services: Mapping[str, HttpService],
    numbers: Mapping[str, int],
    columns: Sequence[tuple[Column, int]],
    draw: Draw,
    *,
    warm: int,
    count: int,
    tokens: int,
) -> AsyncIterator[list[tuple[str, Column, int, list[ReportedCall]]]]:
    """Yields the calls of `count` rounds, each as (way, column, calls at once, calls). `warm` more go before them,
    in which the services are called one after another: each is called when the one before has ended its measurements.

    In a round each of `columns`, with its number of calls at once, is called on all services, in a drawn order, with
    the same prompts and the same adapters, which are in the host memory of every node. Answers have `tokens`.
    `numbers`: of the functions, by digest.
    """
    async with AsyncExitStack() as stack:
        calls = {
            mode: Caller(await stack.enter_async_context(open_session(service.key)), service.url, [], max_tokens=tokens)
            for mode, service in services.items()
        }
        nodes = {
            mode: Residency(await stack.enter_async_context(open_session(service.admin_key)), service.url, numbers)
            for mode, service in services.items()
        }

        async def call(mode: str, planned: Sequence[Planned]) -> list[Answer]:
            if mode == CACHED:
                await _bring(calls[mode], planned, draw)
            return await _together(calls[mode], planned)

        for _ in range(warm):
            for mode, service in services.items():
                for column, at_once in draw.shuffled(columns):
                    await call(mode, draw.calls(column, at_once, await nodes[mode].in_host()))
                await until_idle([service])
        for number in range(count):
            cells = []
            for column, at_once in draw.shuffled(columns):
                cold = set.intersection(*[await node.in_host() for mode, node in nodes.items() if mode != CACHED])
                planned = draw.calls(column, at_once, cold)
                for mode in draw.shuffled(list(services)):
                    answers = await call(mode, planned)
                    cells.append((mode, column, at_once, [report_call(number, answer) for answer in answers]))
            yield cells


async def _bring(call: Caller, planned: Sequence[Planned], draw: Draw) -> None:
    """Call these adapters until all are on the device. What is left after WARMING_CALLS shows in the timed call."""
    for _ in range(WARMING_CALLS):
        warming = [Planned(each.model, draw.prompt(len(each.prompt))) for each in planned]
        if all(answer.state == "none" or answer.load_s for answer in await _together(call, warming)):
            return


async def _together(call: Caller, planned: Sequence[Planned]) -> list[Answer]:
    """Send all at once. Raises RuntimeError unless each is answered whole, and its prompt has the tokens that it is to
    have."""
    samples = await closed_loop(call, planned, len(planned))
    check(samples)
    answers = [sample for sample in samples if isinstance(sample, Answer)]
    for answer, each in zip(answers, planned, strict=True):
        if (answer.prompt_tokens, answer.cached_tokens) != (len(each.prompt), 0):
            raise RuntimeError(f"of a prompt of {len(each.prompt)} tokens: {answer}")
    return answers
