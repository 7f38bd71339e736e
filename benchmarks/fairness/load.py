"""Tenants that call one engine: in real time by rate, or always with more than it can serve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.fair_shares import token_cost
from cluster.messages import Adapter
from tests.support.local_engine import LocalEngine, Outcome

OUTPUT_SPREAD = 4
"""Answers are geometric, cut at so many times their mean."""


@dataclass(frozen=True)
class Client:
    """A tenant: its calls have log-normal prompts and geometric answers around means of its own."""

    name: str
    prompt: int
    output: int
    adapter: Adapter | None = None
    owner: dict[str, Any] = field(default_factory=dict)
    """weight, slo_class, ttft, tpot"""

    @property
    def rank(self) -> int:
        return max(self.adapter.ranks, default=0) if self.adapter else 0

    @property
    def mean_cost(self) -> float:
        return token_cost(self.prompt, self.output, self.rank)


@dataclass(frozen=True)
class Call:
    at: float
    """seconds from the beginning"""
    client: Client
    prompt: list[int]
    output: int


@dataclass(frozen=True)
class Seen:
    call: Call
    outcome: Outcome
    ttft: float | None
    """seconds from when it was due; None: refused, or not begun"""

    @property
    def tpot(self) -> float | None:
        times = self.outcome.times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def cost(self) -> float:
        """Of what was computed for it."""
        made = len(self.outcome.tokens)
        return token_cost(len(self.call.prompt), made, self.call.client.rank) if made else 0.0


def draw(client: Client, at: float, rng: np.random.Generator, vocab: int, most: int) -> Call:
    """`most`: prompt and answer together have at most so many tokens."""
    length = int(np.clip(rng.lognormal(np.log(client.prompt) - 0.125, 0.5), 4, most // 2))
    output = int(np.clip(rng.geometric(1 / client.output), 2, min(OUTPUT_SPREAD * client.output, most // 2)))
    return Call(at, client, rng.integers(3, vocab, length).tolist(), output)


def poisson(client: Client, rate: float, seconds: float, rng: np.random.Generator, vocab: int, most: int) -> list[Call]:
    calls, at = [], rng.exponential(1 / rate)
    while at < seconds:
        calls.append(draw(client, at, rng, vocab, most))
        at += rng.exponential(1 / rate)
    return calls


def submit(engine: LocalEngine, call: Call) -> str:
    client = call.client
    return engine.submit(call.prompt, call.output, client.adapter, ignore_eos=True, tenant=client.name, **client.owner)


def drive(engine: LocalEngine, calls: Sequence[Call], seconds: float) -> list[Seen]:
    """Each call at its time, for so many seconds; what has not ended then is cancelled."""
    due = sorted(calls, key=lambda call: call.at)
    sent: list[tuple[Call, str]] = []
    begin = time.perf_counter()

    def send() -> None:
        while len(sent) < len(due) and due[len(sent)].at <= time.perf_counter() - begin:
            sent.append((due[len(sent)], submit(engine, due[len(sent)])))

    while (now := time.perf_counter() - begin) < seconds:
        send()
        if engine.engine.busy:
            engine.step()
        else:
            following = due[len(sent)].at if len(sent) < len(due) else seconds
            time.sleep(max(0.0, min(following, seconds) - now))
    seen = [_seen(call, engine.outcomes[request], begin) for call, request in sent]
    clear(engine)
    return seen


def drive_backlogged(
    engine: LocalEngine, clients: Sequence[Client], seconds: float, waiting: int, rng: np.random.Generator
) -> dict[str, float]:
    """Every client has `waiting` calls in the queue all the time. Returns the service of each, in token costs per
    second."""
    limits, sent = engine.engine.limits, list[tuple[Call, str]]()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        there = [request.tenant for request in engine.engine.queue]
        for client in clients:
            for _ in range(waiting - there.count(client.name)):
                call = draw(client, 0.0, rng, limits.vocab_size, limits.max_context)
                sent.append((call, submit(engine, call)))
        engine.step()
    took = time.perf_counter() - begin
    served = dict.fromkeys((client.name for client in clients), 0.0)
    for call, request in sent:
        served[call.client.name] += _seen(call, engine.outcomes[request], begin).cost / took
    clear(engine)
    return served


def clear(engine: LocalEngine) -> None:
    engine.engine.cancel_all()
    engine.run()
    engine.outcomes.clear()


def _seen(call: Call, outcome: Outcome, begin: float) -> Seen:
    return Seen(call, outcome, outcome.times[0] - begin - call.at if outcome.times else None)
