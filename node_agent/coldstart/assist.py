"""The assisted part of cold passes: LoRA terms that CPU workers compute while the adapter is loading. The adapter stays
pinned in host memory meanwhile, and the workers are armed, which means that they poll for commands."""

from __future__ import annotations

import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.costs import group_elements, group_shares
from node_agent.coldstart.handoffs import PassHandoffs
from node_agent.coldstart.messages import PassMessages, Share
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.slices import Segment
from node_agent.coldstart.workers import WorkerPool
from node_agent.leases import Lease


class Assist:
    """Opens the assisted part of cold passes, and keeps the adapters' rows in host memory while workers may read them.
    Only the engine's thread calls it."""

    def __init__(self, store: AdapterStore, base: BaseModel, profile: Profile, workers: WorkerPool) -> None:
        self.store, self.base, self.profile, self.workers = store, base, profile, workers
        self._shares = group_shares(base)
        self._ended: list[tuple[HostAdapter, PassHandoffs]] = []

    def begin(self, lease: Lease, layout: AdapterLayout) -> AssistedPass | None:
        """Starts the assisted part of a cold pass of one adapter. Returns None if no worker or handoff slot is free, or
        if the adapter is not in host memory."""
        messages = self.messages(at_once=True)
        if messages is None:
            return None
        assisted = self.join(messages, lease, layout)
        if assisted is None:
            messages.end()
        return assisted

    def messages(self, at_once: bool = False) -> PassMessages | None:
        """Returns the messages of a new pass; the caller must end them. `at_once`: send each adapter's rows to the
        workers when they are added, instead of at `send`. Returns None if no worker or handoff slot is free."""
        handoffs = self.workers.begin_pass() if self.workers.usable else None
        return PassMessages(handoffs, at_once, self.poll) if handoffs is not None else None

    def join(self, messages: PassMessages, lease: Lease, layout: AdapterLayout) -> AssistedPass | None:
        """Starts the assisted part of one adapter in the pass that `messages` belongs to. Returns None if the adapter
        is not in host memory."""
        hold = self.store.hold_host(lease)
        return AssistedPass(self, hold, layout, messages) if hold is not None else None

    def slice_tokens(self, elements: int, tokens: int, group: str) -> int:
        """Returns the number of tokens that one worker computes during the device's base product (c in Toppings
        4.2)."""
        budget = self.profile.layer_seconds(tokens) * self._shares[group]
        return self.profile.slice_tokens(elements, budget)

    def end(self, hold: HostAdapter, handoffs: PassHandoffs) -> None:
        """Releases an ended pass's hold on host rows, at the first `poll` after its handoffs have ended and no worker
        reads the rows any more."""
        self._ended.append((hold, handoffs))

    def poll(self) -> None:
        """Releases the host rows of ended passes that no worker reads any more. A late worker may still read them after
        the pass's end."""
        self.workers.poll()
        ended, self._ended = self._ended, []
        for hold, handoffs in ended:
            if handoffs.quiet:
                self.store.release_host(hold)
            else:
                self._ended.append((hold, handoffs))


class AssistedPass:
    """Assisted part of one adapter in a pass: workers compute its LoRA terms, group by group."""

    def __init__(self, assist: Assist, hold: HostAdapter, layout: AdapterLayout, messages: PassMessages) -> None:
        self._assist, self._hold, self._layout, self._messages = assist, hold, layout, messages
        self._armed, self._open = False, True
        if not assist.workers.rests_between_handoffs:
            self._arm()

    def open(self, x: torch.Tensor, layer: int, group: str) -> Share | None:
        """Makes workers compute the adapter's LoRA term of a group for x [T, d_in]. Returns the share of a message that
        will have the result; None if no worker can take it."""
        self._arm()
        elements = group_elements(self._layout, layer, self._assist.base)[group]
        slice_tokens = self._assist.slice_tokens(elements, x.shape[0], group)
        return self._messages.add(x, Segment(self._hold.slot, x.shape[0], slice_tokens, elements), layer, group)

    @property
    def failed(self) -> bool:
        """Returns whether a handoff has failed without `wait` noticing. On a GPU this is certain only once the pass has
        ended."""
        return self._messages.handoffs.failed

    def answered(self) -> None:
        """Called when the workers have answered a handoff. Disarms them if the engine computes on their cores."""
        if self._assist.workers.rests_between_handoffs:
            self.rest()

    def rest(self) -> None:
        """Disarms the workers until the next `open`, while the pass continues on the device."""
        if self._armed:
            self._armed = False
            self._assist.workers.disarm()

    def end(self) -> None:
        """Disarms the workers, and ends the pass's handoffs if no other adapter uses them. May be called repeatedly,
        and after a failed pass."""
        self.rest()
        if self._open:
            self._open = False
            self._assist.end(self._hold, self._messages.handoffs)
            if self._messages.at_once:
                self._messages.end()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._assist.workers.arm()
