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
"""Answers are geometric, cut at this multiple of their mean."""


@dataclass(frozen=True)
class Client:
    """A tenant: its calls have log-normal prompts and geometric answers around its own means."""

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
    client: Client
    prompt: list[int]
    output: int


@dataclass(frozen=True)
class ClientCall:
    call: Call
    outcome: Outcome
    ttft: float | None
    """seconds from its time; None if it was refused, or not begun"""

    @property
    def tpot(self) -> float | None:
        times = self.outcome.times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def cost(self) -> float:
        """token cost of what was computed for it"""
        output = len(self.outcome.tokens)
        return token_cost(len(self.call.prompt), output, self.call.client.rank) if output else 0.0


def draw(client: Client, at: float, rng: np.random.Generator, vocab: int, max_tokens: int) -> Call:
    """Draws a call whose prompt and answer have at most `max_tokens` together."""
    length = int(np.clip(rng.lognormal(np.log(client.prompt) - 0.125, 0.5), 4, max_tokens // 2))
    output = int(np.clip(rng.geometric(1 / client.output), 2, min(OUTPUT_SPREAD * client.output, max_tokens // 2)))
    return Call(at, client, rng.integers(3, vocab, length).tolist(), output)


def poisson(
    client: Client, rate: float, seconds: float, rng: np.random.Generator, vocab: int, max_tokens: int
) -> list[Call]:
    calls, at = [], rng.exponential(1 / rate)
    while at < seconds:
        calls.append(draw(client, at, rng, vocab, max_tokens))
        at += rng.exponential(1 / rate)
    return calls


def submit(engine: LocalEngine, call: Call) -> str:
    client = call.client
    return engine.submit(call.prompt, call.output, client.adapter, ignore_eos=True, tenant=client.name, **client.owner)


def drive(engine: LocalEngine, calls: Sequence[Call], seconds: float) -> list[ClientCall]:
    """Sends each call at its time, for `seconds`; calls that have not ended then are cancelled."""
    ordered = sorted(calls, key=lambda call: call.at)
    sent: list[tuple[Call, str]] = []
    begin = time.perf_counter()

    def send() -> None:
        while len(sent) < len(ordered) and ordered[len(sent)].at <= time.perf_counter() - begin:
            sent.append((ordered[len(sent)], submit(engine, ordered[len(sent)])))

    while (now := time.perf_counter() - begin) < seconds:
        send()
        if engine.engine.busy:
            engine.step()
        else:
            following = ordered[len(sent)].at if len(sent) < len(ordered) else seconds
            time.sleep(max(0.0, min(following, seconds) - now))
    called = [_client_call(call, engine.outcomes[request], begin) for call, request in sent]
    clear(engine)
    return called


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
        served[call.client.name] += _client_call(call, engine.outcomes[request], begin).cost / took
    clear(engine)
    return served


def clear(engine: LocalEngine) -> None:
    engine.engine.cancel_all()
    engine.run()
    engine.outcomes.clear()


def _client_call(call: Call, outcome: Outcome, begin: float) -> ClientCall:
    return ClientCall(call, outcome, outcome.times[0] - begin - call.at if outcome.times else None)
