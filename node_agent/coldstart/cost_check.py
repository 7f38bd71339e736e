"""Checks whether the costs by which a node chose its number of CPU workers still hold.

Served calls correct the profile's costs of the link and of the engine. A correction proves nothing by itself, since
loads and passes also take longer while the host is busy. So a large one only starts a measurement while the node is
idle, and a change counts once it was measured repeatedly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from adapters.base_model import BaseModel
from node_agent.coldstart.auto_workers import TYPICAL
from node_agent.coldstart.calibration import Calibration, Interrupted
from node_agent.coldstart.learning import LearntLink, engine_correction
from node_agent.coldstart.measure import measure_layers
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.stream import StreamPool
from node_agent.engine.loop import Engine

log = logging.getLogger("garnish.engine")

MOVED = 4 / 3
"""Factor by which a cost must differ from the profile's before the node reconsiders its number of workers."""
CONFIRMATIONS = 2
"""Number of measurements in a row that must find a change."""
CHECK_PAUSE_S = 60.0
"""Minimum seconds between two measurements, and after a decision. On a busy host the measurement's own calls can change
the learnt costs."""
MAX_PAUSE_S = 900.0
"""Maximum of a pause that doubles with each measurement without result."""
RETRY_S = 30.0
"""Seconds before another attempt after a measurement that a real call interrupted."""
ROUNDS = 5
"""Number of pipelined calls that measure the link, and of passes that measure the engine."""


class Pause:
    """Time until the next attempt. It doubles with each attempt without result, from `first_s` to MAX_PAUSE_S
    seconds."""

    def __init__(self, first_s: float) -> None:
        self.first_s, self.seconds, self.until = first_s, first_s, 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    def begin(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def lengthen(self) -> float:
        """Begins a pause and doubles the next one. Returns the seconds of this one."""
        seconds, self.seconds = self.seconds, min(2 * self.seconds, MAX_PAUSE_S)
        self.begin(seconds)
        return seconds

    def reset(self) -> None:
        """Begins the shortest pause."""
        self.seconds = self.first_s
        self.begin(self.first_s)


class CostCheck:
    """Compares the profile's costs of the link and of the engine with their present ones. Only the engine's thread
    calls it."""

    def __init__(self, engine: Engine, base: BaseModel) -> None:
        self.engine, self.base, self.starts = engine, base, engine.cold_start
        self.pause = Pause(CHECK_PAUSE_S)
        self.changes = 0
        """number of measurements in a row that have found the same change"""
        self._repeated: frozenset[str] = frozenset()
        """changes that all of these measurements have found"""
        self._requested = False
        """True if served calls have shown a change that is not measured yet, even if the learnt costs fade meanwhile"""

    def detect_change(self) -> bool:
        """Returns whether a measurement is due: served calls have shown a change, and no pause is left.

        A change stays detected until it is measured.
        """
        if not self.pause.over:
            return False
        self._requested = self._requested or self._learnt_change()
        return self._requested

    def measure(self, should_yield: Callable[[], bool]) -> Profile | None:
        """Measures the costs until `should_yield` returns True. Returns the profile with the changed costs, without
        measured passes, if this was the last of CONFIRMATIONS that found the same change; else None."""
        try:
            with self._fresh_corrections():
                profile = self._measured(should_yield)
        except Interrupted as interrupted:
            self._postpone(str(interrupted), by_call=should_yield())
            return None
        if profile is None:
            self.starts.device = engine_correction()  # the profile holds
            seconds = self._give_up()
            log.info("the costs of cold calls have not changed", extra={"next_check_s": seconds})
            return None
        count = self.changes
        profile = self._confirmed(profile)
        if self.changes > count:
            self.pause.reset()
        else:
            self.pause.lengthen()  # findings that differ again and again are noise
        if self.changes < CONFIRMATIONS:
            return None
        self.changes, self._requested = 0, False
        _log_change(self.starts.profile, profile)
        return profile

    def _confirmed(self, profile: Profile) -> Profile:
        """Counts a measurement with the earlier ones if it has found a change that they all found, else as the first
        one. Returns the profile with these changes alone."""
        before = self.starts.profile
        assert before is not None
        changed = {"link": profile.link != before.link, "layer": profile.layer != before.layer}
        faster = {
            "link": profile.link.bandwidth > before.link.bandwidth,
            "layer": profile.layer_seconds(TYPICAL.tokens) < before.layer_seconds(TYPICAL.tokens),
        }
        latest = frozenset(f"{name} {'faster' if faster[name] else 'slower'}" for name in changed if changed[name])
        again = self.changes > 0 and bool(latest & self._repeated)
        self.changes, self._repeated = (self.changes + 1, latest & self._repeated) if again else (1, latest)
        names = {name.partition(" ")[0] for name in self._repeated}
        if "link" not in names:
            profile = replace(profile, link=before.link)
        if "layer" not in names:
            profile = replace(profile, key=before.key, layer=before.layer, cpu=before.cpu, handoff=before.handoff)
        return profile

    def _learnt_change(self) -> bool:
        """Returns whether the learnt costs differ from the profile's by the factor MOVED."""
        profile, link = self.starts.profile, self.starts.link
        if profile is None or link is None:
            return False
        return _moved(link.cost.bandwidth, profile.link.bandwidth) or _moved(self.starts.device.value, 1.0)

    @contextmanager
    def _fresh_corrections(self) -> Iterator[None]:
        """Forgets what was learnt of link and engine, so that only measured calls teach it. Restores it after an
        exception."""
        starts = self.starts
        assert starts.profile is not None
        learnt = starts.link, starts.device
        starts.link, starts.device = LearntLink(starts.profile.link), engine_correction()
        try:
            yield
        except BaseException:
            starts.link, starts.device = learnt
            raise

    def _measured(self, should_yield: Callable[[], bool]) -> Profile | None:
        """Measures the link by pipelined calls, and the engine by passes without an adapter. Returns the profile with
        those costs that have changed, and without the workers' costs if the engine's have. Returns None if none has
        changed. Raises Interrupted."""
        starts = self.starts
        profile = starts.profile
        assert profile is not None and starts.link is not None
        Calibration(self.engine, self.base, should_yield).measure(TYPICAL, ("pipeline",), ROUNDS)
        link = starts.link.cost if _moved(starts.link.cost.bandwidth, profile.link.bandwidth) else profile.link
        ((tokens, seconds),) = self._layers((TYPICAL.tokens,), should_yield)
        if _moved(seconds, profile.layer_seconds(tokens)):
            layer = self._layers([tokens for tokens, _ in profile.layer], should_yield)
            key = replace(profile.key, workers=0)  # the workers' costs are of the same slower or faster host
            return replace(profile, key=key, layer=layer, cpu=None, handoff=None, link=link, passes=())
        return replace(profile, link=link, passes=()) if link is not profile.link else None

    def _layers(
        self, tokens: list[int] | tuple[int, ...], should_yield: Callable[[], bool]
    ) -> tuple[tuple[int, float], ...]:
        assisted = isinstance(self.starts.workers, StreamPool)
        return measure_layers(self.engine.runner, self.engine.blocks, tokens, ROUNDS, assisted, should_yield)

    def _postpone(self, reason: str, by_call: bool) -> None:
        """Ends an interrupted measurement. It is tried again soon if a real call came. If the node can't measure, it
        waits until served calls show a change again, and at least for a growing pause."""
        if by_call:
            self.pause.begin(RETRY_S)
            log.info("the costs of cold calls are measured later", extra={"reason": reason})
            return
        seconds = self._give_up()
        log.warning("the costs of cold calls can't be measured", extra={"reason": reason, "next_check_s": seconds})

    def _give_up(self) -> float:
        """Waits for another sign of a change. Returns the seconds of the pause until it may count."""
        self.changes, self._requested = 0, False
        return self.pause.lengthen()


def _moved(value: float, reference: float) -> bool:
    return not 1 / MOVED < value / reference < MOVED


def _log_change(before: Profile | None, after: Profile) -> None:
    assert before is not None
    figures = {
        "bytes_per_second": [round(profile.link.bandwidth) for profile in (before, after)],
        "layer_ms": [round(1e3 * profile.layer_seconds(TYPICAL.tokens), 3) for profile in (before, after)],
    }
    log.info("the costs of cold calls have changed; whether CPU workers help is decided again", extra=figures)
