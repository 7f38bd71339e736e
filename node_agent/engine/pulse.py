"""Announces before each computation how long the engine's loop may be silent. A long pass is then not taken for a
stalled engine (node_agent.heartbeat)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MARGIN = 3.0
"""Factor by which the announced seconds exceed the recent duration of a computation, in case the host is busier now."""
MAX_PULSE_S = 50.0
"""Maximum seconds announced; less than the silence after which the engine is killed."""
FIRST_S = 20.0
"""Seconds announced on a GPU before a computation of a new size, since kernels may be compiled."""
FADING = 0.9
"""Factor by which the stored maximum duration decays with each computation."""


class Pulse:
    """Announces silence of the engine's loop by calling `report` with the expected seconds. Learns the seconds per
    layer of each kind and size of computation. A size is a power of two of tokens."""

    def __init__(self, compiles: bool) -> None:
        """`compiles`: whether the first computation of a size may compile kernels."""
        self.report: Callable[[float], None] = lambda _quiet: None
        self._first = FIRST_S if compiles else 0.0
        self._seconds: dict[str, dict[int, float]] = {}

    def beat(self) -> None:
        """Reports that the loop is running."""
        self.report(0.0)

    @contextmanager
    def computing(self, what: str, tokens: int, layers: int = 1) -> Iterator[None]:
        """Announces a computation of `tokens` tokens in `layers` layers, and measures its duration."""
        by_size, size = self._seconds.setdefault(what, {}), tokens.bit_length()
        expected = layers * _per_layer(by_size, size)
        self.report(min(MAX_PULSE_S, max(MARGIN * expected, 0.0 if size in by_size else self._first)))
        started_at = time.perf_counter()
        yield
        seconds = (time.perf_counter() - started_at) / max(1, layers)
        by_size[size] = max(seconds, FADING * by_size.get(size, 0.0))


def _per_layer(by_size: dict[int, float], size: int) -> float:
    """Returns the seconds per layer of a computation whose number of tokens has `size` bits. For an unmeasured size,
    returns the value of the next larger one; beyond the largest, doubles its value per bit. Returns 0 without
    measurements."""
    if size in by_size:
        return by_size[size]
    larger = [seen_size for seen_size in by_size if seen_size > size]
    if larger:
        return by_size[min(larger)]
    largest = max(by_size, default=0)
    return float(by_size.get(largest, 0.0) * 2 ** (size - largest))
