"""Which adapters leave a memory tier that needs room: what is known of their calls, and in which order they go."""

from __future__ import annotations

from collections.abc import Mapping


class Demand:
    """What is known of each adapter's calls: those that came, and the forecast of those to come."""

    def __init__(self) -> None:
        self.chances: Mapping[str, float] = {}
        """By digest: the forecast probability of a call within 30 s. An adapter that is absent is unknown."""

    def expect(self, chances: Mapping[str, float]) -> None:
        """Replaces the forecast."""
        self.chances = dict(chances)
