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

from adapters.base_model import BaseModel
from cluster.messages import Adapter, GenerateRequest, Sampling
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.coldstart.cold_starts import Way
from node_agent.coldstart.pass_times import ROUNDS, CallKind, PassSample
from node_agent.engine.loop import Engine
from node_agent.engine.reserves import Callers
from node_agent.ipc import EngineEvent, Finished, Generated

DIGEST = "calibration"
"""Digest of the made-up adapter; no deployed adapter has it, for theirs are SHA-256."""
ANSWER = 12
"""Tokens of a measured call's answer."""
CALL_LIMIT_S = 30.0
"""Seconds after which a call counts as failed."""
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
    gives_way: Callable[[], bool] = never
    """Says that the engine is wanted. Asked before each step; a call that is under way is cancelled then."""
    _calls: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def measure(self, kind: CallKind, plans: tuple[str, ...], rounds: int = ROUNDS) -> None:
        """Adds `rounds` passes of each plan to the engine's PassTimes, after one of each that does not count: libraries
        prepare themselves for its shapes then. The plans alternate. Raises Interrupted; what was measured stays."""
        times = self.engine.cold_start.times
        for number in range(-1, rounds):
            for plan in plans:
                if number < 0 and times.of(kind, plan):
                    continue
                sample = self.run(kind, plan)
                if number >= 0:
                    times.add(sample)

    def run(self, kind: CallKind, plan: str) -> PassSample:
        """Runs one call. Raises Interrupted."""
        starts, limits = self.engine.cold_start, self.engine.limits
        if kind.tokens > limits.chunk_tokens or kind.tokens + ANSWER > limits.max_context:
            raise Interrupted(f"a prompt of {kind.tokens} tokens with {ANSWER} more does not fit this node")
        layout = self.engine.store.pool.uniform_layout(self.base, kind.rank, kind.projections)
        way, callers = starts.way, self.engine.scheduler.callers
        starts.way, starts.learns = Way((plan,), decodes=plan == "assist" and way.decodes), False
        self.engine.scheduler.callers = Callers()  # no place is kept for the made-up tenant
        try:
            with self._adapter(layout):
                return self._timed(kind, plan, layout)
        finally:
            starts.way, starts.learns, self.engine.scheduler.callers = way, True, callers

    @contextmanager
    def _adapter(self, layout: AdapterLayout) -> Iterator[None]:
        """Lends host memory to the made-up adapter. Raises Interrupted where there is no room."""
        store = self.engine.store
        host = store.hosts.lend(DIGEST, layout)
        if host is None:
            raise Interrupted("host memory has no room for a measured adapter")
        try:
            yield
        finally:
            self._settle()
            store.discard(DIGEST)
            store.hosts.forget(host)

    def _timed(self, kind: CallKind, plan: str, layout: AdapterLayout) -> PassSample:
        self._calls += 1
        name, vocabulary = f"{DIGEST}-{self._calls}", self.base.vocab_size
        prompt = [self._random.randrange(vocabulary) for _ in range(kind.tokens)]  # none that the prefix cache has
        adapter = Adapter(DIGEST, "", layout.live, layout.ranks)
        begun = time.monotonic()
        self.engine.submit(
            GenerateRequest(
                name, "", "", prompt, ANSWER, Sampling(temperature=0.0), CALL_LIMIT_S, adapter, ignore_eos=True
            )
        )
        first, end = self._serve(name, begun)
        made = self.engine.cold_start.latest
        if made is None or made.name != plan:
            raise Interrupted(f"the call was not served by {plan}")
        return PassSample(kind, plan, made.by_profile, first, end)

    def _serve(self, name: str, begun: float) -> tuple[float, float]:
        """Serves the call to its end. Returns the seconds to its first token and to the end of its answer."""
        first = 0.0
        while True:
            if self.gives_way():
                self.engine.cancel(name)
                self.engine.take_events()
                raise Interrupted("the engine is wanted")
            for event in self._step():
                if isinstance(event, Generated) and not first:
                    first = time.monotonic() - begun
                if isinstance(event, Finished):
                    if event.reason != "length":
                        raise Interrupted(f"a measured call ended with {event.reason}: {event.error}")
                    return first, time.monotonic() - begun

    def _step(self) -> list[EngineEvent]:
        """Runs one iteration. Returns its events; waits a little where there was nothing to compute."""
        engine = self.engine
        engine.prepare()
        used = engine.compute_cold()
        events = engine.take_events()
        worked = used > 0
        for _ in engine.compute_hot(used):
            worked = True
            events += engine.take_events()
        if not (worked or events):
            time.sleep(IDLE_S)
        return events

    def _settle(self) -> None:
        """Waits until the made-up adapter's load has ended, CALL_LIMIT_S at most, and its lease is free."""
        store, until = self.engine.store, time.monotonic() + CALL_LIMIT_S
        while time.monotonic() < until:
            store.poll()
            if self.engine.assist is not None:
                self.engine.assist.poll()
            entry, host = store.device.get(DIGEST), store.hosts.get(DIGEST)
            if (entry is None or entry.idle) and (host is None or not host.in_use):
                return
            time.sleep(IDLE_S)
