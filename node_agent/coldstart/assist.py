"""What a cold pass needs of the CPU workers: its adapter held in host memory, workers that poll, and handoffs."""

from __future__ import annotations

import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import HostHold
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart.cold_lora import Handoff
from node_agent.coldstart.costs import group_elements, group_shares
from node_agent.coldstart.profile import Profile
from node_agent.coldstart.workers import PassHandoffs, WorkerPool
from node_agent.types import Lease


class Assist:
    """Owns what open passes hold for their workers. Called by the engine's thread alone."""

    def __init__(self, store: AdapterStore, base: BaseModel, profile: Profile, workers: WorkerPool) -> None:
        self.store, self.base, self.profile, self.workers = store, base, profile, workers
        self._shares = group_shares(base)
        self._ended: list[tuple[HostHold, PassHandoffs]] = []

    def begin(self, lease: Lease, layout: AdapterLayout) -> AssistedPass | None:
        """Begins the assisted part of one cold pass. Returns None when no worker is there or can be given the pass, or
        the adapter is not in host memory (any more)."""
        if not self.workers.usable:
            return None
        hold = self.store.hold_host(lease)
        if hold is None:
            return None
        handoffs = self.workers.begin_pass()
        if handoffs is None:
            self.store.release_host(hold)
            return None
        return AssistedPass(self, hold, layout, handoffs)

    def slice_tokens(self, elements: int, tokens: int, group: str) -> int:
        """c: tokens that one worker computes while the device computes the group's base product (Toppings 4.2)."""
        budget = self.profile.layer_seconds(tokens) * self._shares[group]
        return self.profile.slice_tokens(elements, budget)

    def end(self, hold: HostHold, handoffs: PassHandoffs) -> None:
        self._ended.append((hold, handoffs))
        self.poll()

    def poll(self) -> None:
        """Let go of host rows that no worker can read any more: a late one may still read those of an ended pass."""
        self.workers.poll()
        ended, self._ended = self._ended, []
        for hold, handoffs in ended:
            if handoffs.quiet:
                self.store.release_host(hold)
            else:
                self._ended.append((hold, handoffs))


class AssistedPass:
    """The handoffs of one cold pass."""

    def __init__(self, assist: Assist, hold: HostHold, layout: AdapterLayout, handoffs: PassHandoffs) -> None:
        self._assist, self._hold, self._layout, self._handoffs = assist, hold, layout, handoffs
        self._armed, self._open = False, True
        self._arm()

    def open(self, x: torch.Tensor, layer: int, group: str) -> Handoff | None:
        self._arm()
        elements = group_elements(self._layout, layer, self._assist.base)[group]
        slice_tokens = self._assist.slice_tokens(elements, x.shape[0], group)
        handoff: Handoff | None = self._handoffs.open(x, self._hold.slot, layer, group, slice_tokens)
        return handoff

    @property
    def failed(self) -> bool:
        return self._handoffs.failed

    def rest(self) -> None:
        """The pass goes on on the device: workers need not spin, until the next `open`."""
        if self._armed:
            self._armed = False
            self._assist.workers.disarm()

    def end(self) -> None:
        """Stops the workers' polling and closes the pass's handoffs, however the pass ended; twice does no harm."""
        self.rest()
        if self._open:
            self._open = False
            self._handoffs.end()
            self._assist.end(self._hold, self._handoffs)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._assist.workers.arm()
