"""Measures whole cold calls of a made-up adapter on an idle engine: how long each plan takes from the call to its first
token, and to the end of its answer.

The calls take the path of any other call (queue, load from host memory, cold pass, decode steps), with the plan forced.
What a call borrows of both adapter tiers it has given back when it ends; it may evict idle adapters from the device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from adapters.base_model import BaseModel
from cluster.messages import Adapter, GenerateRequest, Sampling
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.coldstart.cold_starts import ColdStartMode
from node_agent.coldstart.pass_times import ROUNDS, CallKind, PassSample
from node_agent.engine.loop import Engine
from node_agent.engine.reserves import Callers
from node_agent.ipc import Answer, EngineEvent, Finished, Generated

DIGEST = "calibration"
"""Digests of made-up adapters begin so; no deployed adapter's does, for theirs are SHA-256."""
ANSWER = 12
"""Tokens of a measured call's answer."""
CALL_LIMIT_S = 30.0
IDLE_S = 3e-4
"""Seconds between two looks at a load while there is nothing to compute."""


class Interrupted(Exception):
    """The measurement ended early: something else wants to be computed, or there was no room."""


def never() -> bool:
    return False


@dataclass
class Calibration:
    """Runs made-up calls on an idle engine. Called by the engine's thread alone."""

    engine: Engine
    base: BaseModel
    should_yield: Callable[[], bool] = never
    """Says that the engine is wanted. Asked before each step; a call that is under way is cancelled then."""
    _calls: int = 0
    _random: random.Random = field(default_factory=random.Random)
    """Draws prompts that no earlier measurement had: the prefix cache would shorten their passes."""
    _answers: list[EngineEvent] = field(default_factory=list)
    """Answers to an operator's questions that came during a measured call; the engine gets them back."""

    def measure(self, kind: CallKind, plans: tuple[str, ...], rounds: int = ROUNDS, calls: int = 1) -> None:
        """Adds `rounds` passes of each plan to the engine's PassTimes, after one of each that does not count: libraries
        prepare themselves for its shapes then. The plans alternate. `calls` come at once, each with its own adapter.
        Raises Interrupted; what was measured stays."""
        times = self.engine.cold_start.times
        for number in range(-1, rounds):
            for plan in plans:
                if number < 0 and times.of(kind, plan):
                    continue
                sample = self.run(kind, plan, calls)
                if number >= 0:
                    times.add(sample)

    def run(self, kind: CallKind, plan: str, calls: int = 1) -> PassSample:
        """Runs one call, or several at once. Raises Interrupted."""
        starts, limits = self.engine.cold_start, self.engine.limits
        if kind.tokens > limits.chunk_tokens or kind.tokens + ANSWER > limits.max_context:
            raise Interrupted(f"a prompt of {kind.tokens} tokens with {ANSWER} more does not fit this node")
        layout = self.engine.store.pool.uniform_layout(self.base, kind.rank, kind.projections)
        mode, callers = starts.mode, self.engine.scheduler.callers
        starts.mode, starts.learns = ColdStartMode((plan,), decodes=plan == "assist" and mode.decodes), False
        self.engine.scheduler.callers = Callers()  # no place is kept for the made-up tenant
        try:
            with self._adapters(layout, calls) as digests:
                return self._timed(kind, plan, layout, digests)
        finally:
            starts.mode, starts.learns, self.engine.scheduler.callers = mode, True, callers

    @contextmanager
    def _adapters(self, layout: AdapterLayout, count: int) -> Iterator[list[str]]:
        """Lends host memory to made-up adapters. Yields their digests. Raises Interrupted where there is no room."""
        store, lent = self.engine.store, list[HostAdapter]()
        try:
            for number in range(count):
                host = store.hosts.lend(f"{DIGEST}-{number}", layout)
                if host is None:
                    raise Interrupted("host memory has no room for a measured adapter")
                lent.append(host)
            yield [host.digest for host in lent]
        finally:
            for host in lent:
                self._settle(host.digest)
                store.discard(host.digest)
                store.hosts.let_go(host)
                store.hosts.forget(host)

    def _timed(self, kind: CallKind, plan: str, layout: AdapterLayout, digests: list[str]) -> PassSample:
        started_at, starts = time.monotonic(), self.engine.cold_start
        ended = {outcome.request for outcome in starts.outcomes}
        names = [self._submit(kind, Adapter(digest, "", layout.live, layout.ranks)) for digest in digests]
        try:
            firsts, ends = self._serve(names)
        finally:
            for name in names:
                self.engine.cancel(name)  # nothing, where it has ended
            self._answers += [event for event in self.engine.take_events() if isinstance(event, Answer)]
            self.engine.put_back(self._answers)
            self._answers = []
        chosen_plan = starts.latest
        if chosen_plan is None or (chosen_plan.name != plan and len(digests) == 1):
            raise Interrupted(f"the call was not served by {plan}")
        first, end = fmean(firsts.values()) - started_at, fmean(ends.values()) - started_at
        passes = [outcome.seconds for outcome in starts.outcomes if outcome.request not in ended]
        return PassSample(kind, plan, chosen_plan.by_profile, passes[-1] if passes else first, first, end, len(digests))

    def _submit(self, kind: CallKind, adapter: Adapter) -> str:
        """Submits a call with a prompt that the prefix cache does not have. Returns its id."""
        self._calls += 1
        name = f"{DIGEST}-{self._calls}"
        prompt = [self._random.randrange(self.base.vocab_size) for _ in range(kind.tokens)]
        greedy = Sampling(temperature=0.0)
        self.engine.submit(
            GenerateRequest(name, "", "", prompt, ANSWER, greedy, CALL_LIMIT_S, adapter, ignore_eos=True)
        )
        return name

    def _serve(self, names: list[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Serves the calls to their ends. Returns when the first token and the end of each came; monotonic seconds."""
        firsts: dict[str, float] = {}
        ends: dict[str, float] = {}
        while len(ends) < len(names):
            if self.should_yield():
                raise Interrupted("the engine is wanted")
            for event in self._step():
                if isinstance(event, Generated):
                    firsts.setdefault(event.id, time.monotonic())
                elif isinstance(event, Finished):
                    if event.reason != "length":
                        raise Interrupted(f"a measured call ended with {event.reason}: {event.error}")
                    ends[event.id] = time.monotonic()
                elif isinstance(event, Answer):
                    self._answers.append(event)
        return firsts, ends

    def _step(self) -> Iterator[EngineEvent]:
        """Runs one iteration. Yields its events as soon as they are there, as the engine's process sends them; waits a
        little where there was nothing to compute."""
        engine = self.engine
        engine.prepare()
        used = engine.compute_cold()
        events = engine.take_events()
        yield from events
        worked = used > 0 or bool(events)
        for _ in engine.compute_hot(used):
            worked = True
            yield from engine.take_events()
        if not worked:
            time.sleep(IDLE_S)

    def _settle(self, digest: str) -> None:
        """Waits until a made-up adapter's load has ended, CALL_LIMIT_S at most, and its lease is free."""
        store, until = self.engine.store, time.monotonic() + CALL_LIMIT_S
        while time.monotonic() < until:
            store.poll()
            if self.engine.assist is not None:
                self.engine.assist.poll()
            entry, host = store.device.get(digest), store.hosts.get(digest)
            if (entry is None or entry.idle) and (host is None or not (host.copying or host.holds > 1)):
                return
            time.sleep(IDLE_S)
