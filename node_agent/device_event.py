"""Events on a device's stream."""

from __future__ import annotations

from typing import Protocol


class Event(Protocol):
    """Event on the device's stream: it ends when all work that was enqueued before it has ended."""

    def query(self) -> bool:
        """Returns whether the work has ended. Never waits."""

    def synchronize(self) -> None:
        """Waits until the work has ended."""

    def wait(self) -> None:
        """Makes work enqueued on the current stream from now on wait for the event. Returns at once."""


class EndedEvent:
    """Event that has already ended, for a CPU device: its work is done when the call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def wait(self) -> None:
        return None


ENDED = EndedEvent()
