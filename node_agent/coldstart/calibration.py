"""Measures cold calls of a synthetic adapter on an idle engine: time to first token and time to the end of the answer,
by plan.

The calls take the usual path (queue, load from host memory, cold pass, decode steps), with a forced plan. At its end a
call has released all the adapter memory that it used. It may evict idle adapters from the device.
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
"""Prefix of the digests of synthetic adapters. Digests of deployed adapters are SHA-256 and never start with it."""
ANSWER = 12
"""Number of tokens of a measured call's answer."""
CALL_LIMIT_S = 30.0
IDLE_S = 3e-4
"""Seconds of sleep between two iterations of the engine while a load runs and there is nothing to compute."""


class Interrupted(Exception):
    """Internal exception: a measurement ended early, since the engine had other work or there was no room."""


class Unmeasurable(Interrupted):
    """Internal exception: the node's limits never allow such a call."""


def never() -> bool:
    return False


@dataclass
class Calibration:
    """Runs synthetic calls on an idle engine. Only the engine's thread calls it."""

    engine: Engine
    base: BaseModel
    should_yield: Callable[[], bool] = never
    """Returns whether the engine has other work. Checked before each step; True cancels the running call."""
    _calls: int = 0
    _random: random.Random = field(default_factory=random.Random)
    """Source of random prompts. They must differ from earlier ones: the prefix cache would shorten their passes."""
    _answers: list[EngineEvent] = field(default_factory=list)
    """Answers to operators' questions that arrived during a measured call. They are put back into the engine, which
    sends them."""

    def measure(self, kind: CallKind, plans: tuple[str, ...], rounds: int = ROUNDS, calls: int = 1) -> None:
        """Measures `rounds` calls of each plan in turn, and adds their times to the engine's PassTimes. A call of each
        plan comes first that is not counted, since libraries initialise for new shapes.

        `calls`: number of concurrent calls in each round, each with its own adapter. Raises Interrupted; finished
        measurements are kept.
        """
        times = self.engine.cold_start.times
        for number in range(-1, rounds):
            for plan in plans:
                if number < 0 and times.of(kind, plan):
                    continue
                sample = self.run(kind, plan, calls)
                if number >= 0:
                    times.add(sample)

    def run(self, kind: CallKind, plan: str, calls: int = 1) -> PassSample:
        """Runs `calls` concurrent calls with this plan. Returns their times, or the mean times of several calls. Raises
        Interrupted, and Unmeasurable if such a call never fits."""
        starts, limits = self.engine.cold_start, self.engine.limits
        if kind.tokens > limits.chunk_tokens or kind.tokens + ANSWER > limits.max_context:
            raise Unmeasurable(f"a prompt of {kind.tokens} tokens with {ANSWER} more does not fit this node")
        layout = self.engine.store.pool.uniform_layout(self.base, kind.rank, kind.projections)
        mode, callers = starts.mode, self.engine.scheduler.callers
        starts.mode, starts.learns = ColdStartMode((plan,), decodes=plan == "assist" and mode.decodes), False
        self.engine.scheduler.callers = Callers()  # reserve nothing for the synthetic tenant
        try:
            with self._adapters(layout, calls) as digests:
                return self._timed(kind, plan, layout, digests)
        finally:
            starts.mode, starts.learns, self.engine.scheduler.callers = mode, True, callers

    @contextmanager
    def _adapters(self, layout: AdapterLayout, count: int) -> Iterator[list[str]]:
        """Allocates synthetic adapters in host memory. Yields their digests and frees them at the end. Raises
        Interrupted if there is no room."""
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
                self.engine.cancel(name)  # no effect if it has ended
            self._answers += [event for event in self.engine.take_events() if isinstance(event, Answer)]
            self.engine.put_back(self._answers)
            self._answers = []
        chosen_plan = starts.latest
        if chosen_plan is None or (chosen_plan.name != plan and len(digests) == 1):
            raise Interrupted(f"the call was not served with plan {plan}")
        first, end = fmean(firsts.values()) - started_at, fmean(ends.values()) - started_at
        passes = [outcome.seconds for outcome in starts.outcomes if outcome.request not in ended]
        return PassSample(kind, plan, chosen_plan.by_profile, passes[-1] if passes else first, first, end, len(digests))

    def _submit(self, kind: CallKind, adapter: Adapter) -> str:
        """Submits a call with a random prompt. Returns its id."""
        self._calls += 1
        name = f"{DIGEST}-{self._calls}"
        prompt = [self._random.randrange(self.base.vocab_size) for _ in range(kind.tokens)]
        greedy = Sampling(temperature=0.0)
        self.engine.submit(
            GenerateRequest(name, "", "", prompt, ANSWER, greedy, CALL_LIMIT_S, adapter, ignore_eos=True)
        )
        return name

    def _serve(self, names: list[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Runs the engine until all calls have ended. Returns the times of their first tokens and of their ends, in
        monotonic seconds by id."""
        firsts: dict[str, float] = {}
        ends: dict[str, float] = {}
        while len(ends) < len(names):
            if self.should_yield():
                raise Interrupted("the engine has other work")
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
        """Runs one iteration and yields its events as soon as they exist, like the engine process. Sleeps for IDLE_S if
        there was nothing to compute."""
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
        """Waits up to CALL_LIMIT_S seconds until a synthetic adapter's load has ended and its lease is released."""
        store, until = self.engine.store, time.monotonic() + CALL_LIMIT_S
        while time.monotonic() < until:
            store.poll()
            if self.engine.assist is not None:
                self.engine.assist.poll()
            entry, host = store.device.get(digest), store.hosts.get(digest)
            if (entry is None or entry.idle) and (host is None or not (host.copying or host.holds > 1)):
                return
            time.sleep(IDLE_S)
