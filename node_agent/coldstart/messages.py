"""Messages to the CPU workers: one for each projection group and layer of a pass, however many adapters it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from node_agent.coldstart.handoffs import PassHandoffs
from node_agent.coldstart.slices import Segment


class PassMessages:
    """The handoffs of one pass. What its adapters hand over for one group of a layer goes as one handoff."""

    def __init__(self, handoffs: PassHandoffs, at_once: bool, on_end: Callable[[], None]) -> None:
        """`at_once`: the pass has one adapter, whose rows wait for no others'."""
        self.handoffs, self.at_once, self._on_end = handoffs, at_once, on_end
        self._next: Message | None = None

    def add(self, x: torch.Tensor, segment: Segment, layer: int, group: str) -> Share | None:
        """Has the segment's rows x [T, d_in] handed over by the next `send`, or now, with `at_once`. All that is added
        before a `send` is of one layer and group. Returns None when no worker takes it now."""
        if self._next is None:
            self._next = Message(layer, group)
        share = self._next.add(x, segment)
        return share if not self.at_once or self.send() else None

    def send(self) -> bool:
        """Hands over what was added since the last time. Returns False when no worker takes it: then its shares do not
        arrive."""
        message, self._next = self._next, None
        return message is None or message.send(self.handoffs)

    def end(self) -> None:
        """The pass hands over nothing more; twice does no harm."""
        self.handoffs.end()
        self._on_end()


class Message:
    """Rows for one projection group of a layer, and the handoff that they make."""

    def __init__(self, layer: int, group: str) -> None:
        self._layer, self._group = layer, group
        self._rows: list[torch.Tensor] = []
        self._segments: list[Segment] = []
        self._handoff: Any = None
        self._arrived: bool | None = None
        self._unread = 0

    def add(self, x: torch.Tensor, segment: Segment) -> Share:
        begin = sum(before.tokens for before in self._segments)
        self._rows.append(x)
        self._segments.append(segment)
        self._unread += 1
        return Share(self, begin, begin + segment.tokens)

    def send(self, handoffs: PassHandoffs) -> bool:
        x = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)
        self._handoff = handoffs.open(x, self._segments, self._layer, self._group)
        self._rows.clear()
        return self._handoff is not None

    def wait(self) -> bool:
        """Waits once, for all shares."""
        if self._arrived is None:
            self._arrived = self._handoff is not None and self._handoff.wait()
        return self._arrived

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = self._handoff.outputs
        return outputs

    def close_share(self) -> None:
        """Ends the reading of one share; the last one closes the handoff."""
        self._unread -= 1
        if not self._unread and self._handoff is not None:
            self._handoff.close()


class Share:
    """The rows of one adapter in a message: its part of the adapters' work, being computed by CPU workers."""

    def __init__(self, message: Message, begin: int, end: int) -> None:
        self._message, self._begin, self._end = message, begin, end
        self._open = True

    def wait(self) -> bool:
        """Waits, within a bound; on a device with a stream, is enqueued there. Returns False when the message's rows do
        not come: then no share of it does, and nobody may read `outputs`."""
        return self._message.wait()

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Returns one [T, d_out] per projection of the group: scale * x A B. Valid after `wait`, until `close`."""
        return [y[self._begin : self._end] for y in self._message.outputs]

    def close(self) -> None:
        """Nobody reads `outputs` any more."""
        if self._open:
            self._open = False
            self._message.close_share()
