"""An engine's cold calls played out with given costs: one engine, one link that loads share, one worker. No clock, no
process: time is a number. Plans and joining are asked of whoever is tested; nothing else of the product is used but
their costs' types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from node_agent.coldstart.planner import ChunkCosts, DecodeCosts, StepCosts

LAYERS = 30
MAX_COLD, MAX_JOINED = 4, 4


@dataclass(frozen=True)
class Host:
    """Seconds a layer: of the device by tokens, of the base's product beside a worker's part, of that part, of a load
    that has the link alone."""

    device: tuple[float, float]
    beside: float
    worker: tuple[float, float]
    load: float

    def device_s(self, tokens: int) -> float:
        return self.device[0] + self.device[1] * tokens

    def extra_s(self, *parts: int) -> float:
        """What workers who compute these parts, of so many tokens each, take longer than the product beside them."""
        work = sum(self.worker[0] + self.worker[1] * tokens for tokens in parts)
        return max(0.0, work - self.beside * self.device_s(sum(parts)))


@dataclass(frozen=True)
class Way:
    """How the calls are served: `plan` gives the assisted layers, None to wait for all; `join` whether rows join."""

    plan: Callable[[ChunkCosts], int | None]
    join: Callable[[StepCosts], bool]


@dataclass(eq=False)
class PlayedCall:
    due: float
    tokens: int
    answer: int
    order: list[int] = field(default_factory=list)
    """layers that have still to come; the first one is on its way"""
    left: float = 0.0
    """of the load of the first one, alone on the link"""
    assisted: int | None = None
    planned: bool = False
    others: int = 0
    load_s: float = 0.0
    """a layer's, as planned"""
    layer: int = 0
    times: list[float] = field(default_factory=list)

    @property
    def loaded(self) -> bool:
        return not self.order

    @property
    def done(self) -> bool:
        return len(self.times) == self.answer


class PlayedEngine:
    def __init__(self, host: Host, way: Way) -> None:
        self.host, self.way, self.now = host, way, 0.0
        self.running: list[PlayedCall] = []

    def serve(self, calls: Sequence[PlayedCall]) -> None:
        """Until each has its answer."""
        waiting = sorted(calls, key=lambda call: call.due)
        while waiting or self.running:
            while waiting and waiting[0].due <= self.now:
                call = waiting.pop(0)
                call.order, call.left = list(range(LAYERS)), self.host.load
                self.running.append(call)
            if not (self._cold() | self._hot()):
                self._pass(self._idle(waiting))
            self.running = [call for call in self.running if not call.done]

    def _idle(self, waiting: Sequence[PlayedCall]) -> float:
        """Seconds until something can happen."""
        loads = [call.left for call in self.running if not call.loaded]
        ends = [left * len(loads) for left in loads] + [call.due - self.now for call in waiting[:1]]
        return min(ends)

    def _pass(self, seconds: float) -> None:
        """Time in which loads go on, sharing the link."""
        end = self.now + seconds
        while self.now < end:
            loads = [call for call in self.running if not call.loaded]
            step = min([end - self.now, *(call.left * len(loads) for call in loads)])
            self.now = end if step >= end - self.now else self.now + step
            for call in loads:
                call.left -= step / len(loads)
                if call.left <= 1e-12:
                    call.order.pop(0)
                    call.left = self.host.load

    def _cold(self) -> bool:
        """Advances prompts whose adapter is on its way, as far as each can go."""
        worked = False
        for call in self.running:
            if not (call.times or call.planned or call.loaded) and len(self._open) < MAX_COLD:
                self._plan(call)
        for call in self._open:
            while call.layer < LAYERS and self._can(call):
                here = call.layer not in call.order
                extra = 0.0 if here else self.host.extra_s(call.tokens)
                self._pass(self.host.device_s(call.tokens) + extra)
                call.layer, worked = call.layer + 1, True
            if call.layer == LAYERS:
                call.times.append(self.now)
        return worked

    @property
    def _open(self) -> list[PlayedCall]:
        """Those that have a pass of their own."""
        return [call for call in self.running if not call.times and call.assisted is not None]

    def _can(self, call: PlayedCall) -> bool:
        assert call.assisted is not None
        if call.layer not in call.order or call.layer < call.assisted:
            return True
        ahead = sum(call.load_s for layer in range(call.assisted, call.layer + 1) if layer in call.order)
        return call.assisted > 0 and (1 + call.others) * self.host.extra_s(call.tokens) < ahead

    def _plan(self, call: PlayedCall) -> None:
        device, extra = self.host.device_s(call.tokens), self.host.extra_s(call.tokens)
        ahead = sum(
            (LAYERS - other.layer) * self.host.device_s(other.tokens)
            + max(0, (other.assisted or 0) - other.layer) * self.host.extra_s(other.tokens)
            for other in self._open
        )
        loads = sum(not other.loaded for other in self.running)
        call.load_s, call.others, call.planned = loads * self.host.load, len(self.running) - 1, True
        load = np.array([call.load_s if layer in call.order else 0.0 for layer in range(LAYERS)])
        step = LAYERS * self.host.device_s(1 + call.others)
        longer = LAYERS / 2 * self.host.extra_s(1)
        joins = longer <= device_share(call.others) * step
        decode = DecodeCosts(min(call.answer - 1, 12), step, longer if joins else float("inf"))
        together = self.host.load <= device
        sharing = call.others if together else sum(other.loaded for other in self.running)
        apart = sharing * LAYERS * self.host.device[0]
        costs = ChunkCosts(
            device, np.full(LAYERS, device + extra), load, np.zeros(LAYERS), ahead=ahead, other_requests=call.others,
            apart=apart, decode=decode if call.answer > 1 else None,
        )  # fmt: skip
        call.assisted = self.way.plan(costs)
        if call.assisted is not None:
            order = [*range(call.assisted, LAYERS), *range(call.assisted)]
            call.order = [layer for layer in order if layer in call.order]

    def _hot(self) -> bool:
        """One pass of all rows whose adapter is there, and of those that join; prompts that waited for it, too."""
        going = [call for call in self.running if not call.done]
        rows = [call for call in going if call.loaded and (call.times or call.assisted is None)]
        waiting = [call for call in going if call.times and not call.loaded]
        others, joined, before = len(going) - len(waiting), [], 0.0
        for call in waiting:
            longer = sum(self._step_extra([*joined, call], layer) for layer in range(LAYERS)) - before
            left = len(call.order) * self.host.load * sum(not other.loaded for other in self.running)
            device = LAYERS * self.host.device_s(others + 1)
            if len(joined) < MAX_JOINED and self.way.join(StepCosts(device, longer, before, left, 1, others)):
                joined.append(call)
                before, others = before + longer, others + 1
        rows += joined
        if not rows:
            return False
        tokens = sum(1 if call.times else call.tokens for call in rows)
        self._pass(LAYERS * self.host.device_s(tokens) + before)
        for call in rows:
            call.times.append(self.now)
        return True

    def _step_extra(self, joined: Sequence[PlayedCall], layer: int) -> float:
        return self.host.extra_s(*(1 for call in joined if layer in call.order)) if joined else 0.0


def device_share(others: int) -> float:
    """Of a step's time: by so much one row may lengthen it (planner.longest_step)."""
    return min(0.25, 1 / (1 + others)) if others else float("inf")
