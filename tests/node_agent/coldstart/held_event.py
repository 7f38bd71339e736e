"""A device's event that happens when a test says so."""

from __future__ import annotations

from tests.node_agent.coldstart.pools import eventually


class HeldEvent:
    """Work that has not ended until it is let go."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        eventually(lambda: self.over)

    def wait(self) -> None:
        return None
