"""Messages to the CPU workers: one per projection group and layer of a pass, for all its adapters together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from node_agent.coldstart.handoffs import PassHandoffs
from node_agent.coldstart.slices import Segment


class PassMessages:
    """Messages of one pass to the CPU workers. The rows of all adapters for one group of a layer form one message."""

    def __init__(self, handoffs: PassHandoffs, at_once: bool, on_end: Callable[[], None]) -> None:
        """`at_once`: the pass has one adapter, so its rows are sent without waiting for others."""
        self.handoffs, self.at_once, self._on_end = handoffs, at_once, on_end
        self._next: Message | None = None

    def add(self, x: torch.Tensor, segment: Segment, layer: int, group: str) -> Share | None:
        """Adds the rows x [T, d_in] of one adapter to the next `send`; with `at_once`, sends them now. All rows added
        before a `send` must be for the same layer and group.

        Returns the adapter's share of the message; None when no worker takes the rows now.
        """
        if self._next is None:
            self._next = Message(layer, group)
        share = self._next.add(x, segment)
        return share if not self.at_once or self.send() else None

    def send(self) -> bool:
        """Sends the rows added since the last call as one message. Returns False if no worker takes them; `wait` of
        their shares then fails."""
        message, self._next = self._next, None
        return message is None or message.send(self.handoffs)

    def end(self) -> None:
        """Ends the pass's handoffs. May be called repeatedly."""
        self.handoffs.end()
        self._on_end()


class Message:
    """Rows for one projection group of a layer, and the handoff that has them."""

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
        """Waits for the handoff's results at the first call; later calls return the same. Returns whether they
        arrived."""
        if self._arrived is None:
            self._arrived = self._handoff is not None and self._handoff.wait()
        return self._arrived

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = self._handoff.outputs
        return outputs

    def close_share(self) -> None:
        """Ends the use of one share. The last one closes the handoff."""
        self._unread -= 1
        if not self._unread and self._handoff is not None:
            self._handoff.close()


class Share:
    """Rows of one adapter in a message, whose LoRA terms CPU workers compute."""

    def __init__(self, message: Message, begin: int, end: int) -> None:
        self._message, self._begin, self._end = message, begin, end
        self._open = True

    def wait(self) -> bool:
        """Waits for the results of the whole message, within a time limit; on a GPU, enqueues the wait. Returns False
        if they do not arrive; `outputs` must then not be read for any share."""
        return self._message.wait()

    @property
    def outputs(self) -> Sequence[torch.Tensor]:
        """Returns scale * x A B [T, d_out] for each projection of the group. Valid after `wait`, until `close`."""
        return [y[self._begin : self._end] for y in self._message.outputs]

    def close(self) -> None:
        """Ends the use of `outputs`."""
        if self._open:
            self._open = False
            self._message.close_share()
