"""Announces before each stretch of computing how long the engine's loop may be silent. A long pass is then not mistaken
for a stalled engine (node_agent.heartbeat)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MARGIN = 3.0
"""Times what such a stretch took lately: the host may be busier now."""
LONGEST_S = 50.0
"""Seconds that are announced at most: less than the silence after which the engine is killed."""
FIRST_S = 20.0
"""Announced on a GPU before a stretch of a size that was not computed yet: kernels are compiled then."""
FADING = 0.9
"""Factor by which each stretch fades a longer one before it."""


class Pulse:
    """Announcer of silence: `report` is called with the seconds of silence to come. Learns how long stretches of each
    size (a power of two of tokens) take, per layer."""

    def __init__(self, compiles: bool) -> None:
        """`compiles`: the first stretch of a size may compile kernels."""
        self.report: Callable[[float], None] = lambda _quiet: None
        self._first = FIRST_S if compiles else 0.0
        self._seconds: dict[str, dict[int, float]] = {}

    def beat(self) -> None:
        """Reports that the loop runs."""
        self.report(0.0)

    @contextmanager
    def computing(self, what: str, tokens: int, layers: int = 1) -> Iterator[None]:
        """Announce a stretch, and learn how long it took."""
        by_size, size = self._seconds.setdefault(what, {}), tokens.bit_length()
        expected = layers * _per_layer(by_size, size)
        self.report(min(LONGEST_S, max(MARGIN * expected, 0.0 if size in by_size else self._first)))
        started_at = time.perf_counter()
        yield
        seconds = (time.perf_counter() - started_at) / max(1, layers)
        by_size[size] = max(seconds, FADING * by_size.get(size, 0.0))


def _per_layer(by_size: dict[int, float], size: int) -> float:
    """Returns the seconds per layer of a stretch whose number of tokens has `size` bits. Where none of that size was
    seen: the next larger size's, else the largest one's, doubled for each bit more; 0 when none was seen at all."""
    if size in by_size:
        return by_size[size]
    larger = [seen_size for seen_size in by_size if seen_size > size]
    if larger:
        return by_size[min(larger)]
    largest = max(by_size, default=0)
    return float(by_size.get(largest, 0.0) * 2 ** (size - largest))
