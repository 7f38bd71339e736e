"""Records of how far an adapter has come: in host memory, and on its way to the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adapters.artifact import ArtifactHeader
from cluster.residency import HeldTier
from node_agent.adapter_memory.disk_cache import CachedFile
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loader_threads import Priority
from node_agent.adapter_memory.ranges import FirstBytes
from node_agent.adapter_memory.weights import AdapterWeights, LayerWeights
from node_agent.device import Event
from node_agent.states import DEVICE_TRANSITIONS, HOST_TRANSITIONS, DeviceState, HostState, check_transition
from node_agent.types import LayerState, LoadFailed

NEARLY_DONE = 0.25
"""A load of which no more than this share has still to come is ended even if nobody wants it any more."""


@dataclass(eq=False)
class HostAdapter:
    """Adapter in host memory, in the pool's dtype and row order.

    The engine's thread writes `waiters`, `leased`, `holds`, `copy`, what follows from them (`priority`) and what it
    took (`pages`, which loader threads fill, `slot` and `run`). HOST_TRANSITIONS says who writes `state`. Loader
    threads write the rest.
    """

    digest: str
    artifact: str
    state: HostState = HostState.READING_HEADER
    failure: LoadFailed | None = None
    """set before `state` says that the load failed or was abandoned"""
    waiters: int = 0
    """queued requests, and prefetches, that want it"""
    priority: Priority = Priority.REQUEST
    """priority of the most urgent of those who want it and of the requests that lease it on the device; the last one
    stays"""
    prefetched: bool = False
    """no request wanted it when its load began: how long that took says nothing of the store"""
    copy: CopyStates | None = None
    """latest copy to the device that was claimed"""
    leased: bool = False
    holds: int = 0
    """number of CPU workers' holds on it"""
    origin: HeldTier = "absent"
    """tier that its bytes come from: disk, or absent (the store)"""
    began: float = field(default_factory=time.monotonic)
    header: ArtifactHeader | None = None
    layout: AdapterLayout | None = None
    cached: CachedFile | None = None
    """file in the disk cache, once the header was read from there"""
    pages: list[int] | None = None
    slot: int = -1
    run: int = -1
    """slot and first row in the host table, while it has pages"""
    first: FirstBytes | None = None
    """the artifact's beginning, read with the header, until its layers are placed"""
    here: bytearray = field(default_factory=bytearray)
    """1 for each layer that has arrived and was verified"""
    arrived: float = 0.0
    """arrival of the last layer; monotonic seconds"""

    def change_state(self, state: HostState) -> None:
        """Sets the state. Raises IllegalTransition unless HOST_TRANSITIONS has the change. While a fetch runs, the
        caller has the lock of the fetching threads."""
        check_transition(self.state, state, HOST_TRANSITIONS)
        self.state = state

    def end_badly(self, failure: LoadFailed, state: HostState = HostState.FAILED) -> None:
        """Sets the failure, then the state. No thread touches the adapter's pages any more."""
        self.failure = failure
        self.change_state(state)

    @property
    def complete(self) -> bool:
        """Returns whether all layers have arrived and were verified."""
        return self.state is HostState.COMPLETE

    @property
    def failed(self) -> bool:
        """Returns whether the load ended without all layers: it failed, or was abandoned."""
        return self.state is HostState.FAILED or self.state is HostState.ABANDONED

    @property
    def copying(self) -> bool:
        """Returns whether a copy to the device reads the adapter's pages, or is to."""
        return self.copy is not None and not self.copy.settled

    def bytes_left(self, upto: int) -> int:
        """Returns the bytes of layers 0..upto, as the artifact has them, that have not arrived; 0 while the header is
        not read."""
        if self.header is None or not self.here:
            return 0
        return sum(
            block.size for block, here in zip(self.header.layers[: upto + 1], self.here, strict=False) if not here
        )

    @property
    def fetched(self) -> float:
        """Returns the share of the adapter's bytes, 0 to 1, that has arrived; 0 while the header is not read."""
        if self.header is None or not self.here:
            return 0.0
        return 1 - self.bytes_left(len(self.here)) / max(1, sum(block.size for block in self.header.layers))

    @property
    def unwanted(self) -> bool:
        return not (self.waiters or self.copying or self.holds)

    @property
    def given_up(self) -> bool:
        """Returns whether nobody wants the adapter, and what is here is not worth the rest."""
        return self.unwanted and (self.state is HostState.RECLAIMED or not self.nearly_done)

    @property
    def nearly_done(self) -> bool:
        """Returns whether no more than NEARLY_DONE of the bytes are still to come; False while the header is not
        read."""
        return self.fetched >= 1 - NEARLY_DONE

    @property
    def in_use(self) -> bool:
        """Returns whether somebody may still read the adapter's pages, or a thread write them."""
        return self.copying or self.holds > 0 or not (self.complete or self.failed)

    @property
    def size(self) -> int:
        return self.layout.size if self.layout else 0


@dataclass(eq=False)
class CopyStates:
    """Progress of one copy to the device. Written by loader threads, read by the engine; DEVICE_TRANSITIONS says who
    writes `state`."""

    layers: list[int]
    """a LayerState each: NO until the layer is enqueued"""
    views: list[LayerWeights | None]
    events: list[Event | None]
    """events behind the layers' copies; they and the views are set before a layer's state says ENQUEUED or DEVICE"""
    order: Sequence[int]
    """order of the copies, as far as layers are in host memory"""
    state: DeviceState = DeviceState.COPYING
    failure: LoadFailed | None = None
    """set before `state` says that the copy failed or was cancelled"""
    arrived: float = 0.0
    """end of the copy; monotonic seconds"""
    began: float = 0.0
    """start of the first layer's crossing; monotonic seconds"""
    bytes_before: int = 0
    """bytes for any adapter that had crossed to the device when it began"""
    bytes_after: int = 0
    stream: torch.cuda.Stream | None = None

    @classmethod
    def of(cls, layers: int, layer_state: int = LayerState.NO, state: DeviceState = DeviceState.COPYING) -> CopyStates:
        return cls([layer_state] * layers, [None] * layers, [None] * layers, range(layers), state)

    def change_state(self, state: DeviceState) -> None:
        """Sets the state. Raises IllegalTransition unless DEVICE_TRANSITIONS has the change. While the copy runs, the
        caller has the lock of the copying threads."""
        check_transition(self.state, state, DEVICE_TRANSITIONS)
        self.state = state

    @property
    def abandoned(self) -> bool:
        """Returns whether it ends, or ended, because nobody wanted the adapter any more."""
        return self.state in (DeviceState.CANCELLED, DeviceState.COPY_STOPPED, DeviceState.ABANDONED)

    @property
    def ended(self) -> bool:
        """Returns whether no thread touches the target any more."""
        return self.state is not DeviceState.COPYING and self.state is not DeviceState.CANCELLED

    @property
    def settled(self) -> bool:
        """Returns whether the engine has taken note of the end."""
        return self.state in (DeviceState.READY, DeviceState.FAILED, DeviceState.ABANDONED)


@dataclass
class DeviceAdapter:
    """Adapter that has room on the device."""

    host: HostAdapter
    layout: AdapterLayout
    slot: int
    pages: list[int]
    run: int
    began: float
    """start of the load that brings it here; monotonic seconds"""
    copy: CopyStates
    leases: int = 0
    prefetched: bool = False
    """no request wanted it when this load began: how long it took says nothing of the link"""
    served: bool = False
    """A request got its answer from it: the load runs to its end, for more requests are to be expected."""
    load_seconds: float = 0.0
    weights: AdapterWeights | None = None
    """Set when the adapter is wholly there. The table names it from the start."""

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def bytes_left(self) -> int:
        """Returns the bytes of the layers that are not on the device."""
        moved = zip(self.layout.moved, self.copy.layers, strict=True)
        return sum(size for size, state in moved if state != LayerState.DEVICE)

    @property
    def copied(self) -> float:
        """Returns the share, 0 to 1, of what a copy moves that is on the device."""
        return 1 - self.bytes_left / max(1, sum(self.layout.moved))

    @property
    def settled(self) -> bool:
        """Returns whether its load is over, well or not."""
        return self.copy.settled

    @property
    def idle(self) -> bool:
        """Returns whether nobody reads or writes the adapter on the device."""
        return self.leases == 0 and self.settled
