"""Records of the progress of an adapter's load into host memory and of its copy to the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from adapters.artifact import ArtifactHeader
from cluster.residency import HeldTier
from node_agent.adapter_memory.disk_cache import CachedFile
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.ranges import FirstBytes
from node_agent.adapter_memory.weights import AdapterWeights, LayerWeights
from node_agent.device_event import Event
from node_agent.leases import LayerState, LoadFailed
from node_agent.states import DEVICE_TRANSITIONS, HOST_TRANSITIONS, DeviceState, HostState, check_transition

NEARLY_DONE = 0.25
"""Share of an adapter's bytes, 0 to 1. A load that lacks at most this share runs to its end even if nobody waits for
the adapter."""


@dataclass(eq=False)
class HostAdapter:
    """Adapter in host memory, in the dtype and row order of the host pool.

    The engine's thread writes `waiters`, `leased`, `tenant`, `holds`, `copy` and `priority`. It also writes what it
    allocates: `pages` (loader threads fill them), `slot` and `run`. HOST_TRANSITIONS says which thread writes `state`.
    Loader threads write all other fields.
    """

    digest: str
    artifact: str
    state: HostState = HostState.READING_HEADER
    failure: LoadFailed | None = None
    """set before `state` becomes FAILED or ABANDONED"""
    waiters: int = 0
    """number of queued requests and prefetches that wait for the adapter"""
    priority: Priority = Priority.REQUEST
    """priority of the most urgent waiter, or of a request with a lease on the device. Without either, it keeps its last
    value."""
    prefetched: bool = False
    """True if no request waited when the load began. The duration of such a load is not used to measure the store."""
    copy: CopyStates | None = None
    """latest copy to the device that claimed this adapter"""
    leased: bool = False
    tenant: str = ""
    """tenant whose request or prefetch wanted the adapter last; empty if no tenant did"""
    holds: int = 0
    """number of holds by which passes keep the adapter in host memory for CPU workers"""
    origin: HeldTier = "absent"
    """tier from which its bytes are read: "disk", or "absent" (the object store)"""
    began: float = field(default_factory=time.monotonic)
    header: ArtifactHeader | None = None
    layout: AdapterLayout | None = None
    cached: CachedFile | None = None
    """file in the disk cache; None unless the header was read from it"""
    pages: list[int] | None = None
    slot: int = -1
    run: int = -1
    """index of the first row in the host table; `slot` and `run` are -1 while the adapter has no pages"""
    first: FirstBytes | None = None
    """first bytes of the artifact, read with the header; dropped once their layers are in the pages"""
    here: bytearray = field(default_factory=bytearray)
    """one byte per layer: 1 once the layer has arrived and was verified"""
    arrived: float = 0.0
    """time at which the last layer arrived, in monotonic seconds"""

    def change_state(self, state: HostState) -> None:
        """Sets the state. The caller must hold the lock of the fetching threads while a fetch runs. Raises
        IllegalTransition unless HOST_TRANSITIONS has the transition."""
        check_transition(self.state, state, HOST_TRANSITIONS)
        self.state = state

    def end_badly(self, failure: LoadFailed, state: HostState = HostState.FAILED) -> None:
        """Ends the load without success: records the failure, then sets the state. From then on no thread reads or
        writes the adapter's pages."""
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
    def abandoned(self) -> bool:
        """Returns whether the load was abandoned because nobody wanted the adapter, and has ended."""
        return self.state is HostState.ABANDONED

    @property
    def copying(self) -> bool:
        """Returns whether a copy to the device is pending, running, or ended but not yet recorded by the engine."""
        return self.copy is not None and not self.copy.settled

    def bytes_left(self, upto: int) -> int:
        """Returns the bytes of layers 0..upto that have not arrived, in the artifact's format. Returns 0 until the
        header is read."""
        if self.header is None or not self.here:
            return 0
        return sum(
            block.size for block, here in zip(self.header.layers[: upto + 1], self.here, strict=False) if not here
        )

    @property
    def fetched(self) -> float:
        """Returns the share of the adapter's bytes that has arrived, 0 to 1. Returns 0 until the header is read."""
        if self.header is None or not self.here:
            return 0.0
        return 1 - self.bytes_left(len(self.here)) / max(1, sum(block.size for block in self.header.layers))

    @property
    def unwanted(self) -> bool:
        """Returns whether no request, prefetch, copy or worker wants the adapter."""
        return not (self.waiters or self.copying or self.holds)

    @property
    def given_up(self) -> bool:
        """Returns whether nobody wants the adapter and its load should end: it was reclaimed, or is not nearly done."""
        return self.unwanted and (self.state is HostState.RECLAIMED or not self.nearly_done)

    @property
    def nearly_done(self) -> bool:
        """Returns whether at most NEARLY_DONE of the bytes are missing. Returns False until the header is read."""
        return self.fetched >= 1 - NEARLY_DONE

    @property
    def in_use(self) -> bool:
        """Returns whether a copy, a CPU worker or a loader thread may still access the adapter's pages."""
        return self.copying or self.holds > 0 or not (self.complete or self.failed)

    @property
    def size(self) -> int:
        """Bytes of the adapter's pages; 0 until the header is read."""
        return self.layout.size if self.layout else 0


@dataclass(eq=False)
class CopyStates:
    """Progress of one copy to the device. Loader threads write it, the engine reads it. DEVICE_TRANSITIONS says which
    thread writes `state`."""

    layers: list[int]
    """LayerState of each layer; NO until the layer's copy is enqueued"""
    views: list[LayerWeights | None]
    events: list[Event | None]
    """event after the copy of each layer; it and the views are set before the layer becomes ENQUEUED or DEVICE"""
    order: Sequence[int]
    """order in which layers are copied, among those that are in host memory"""
    state: DeviceState = DeviceState.COPYING
    failure: LoadFailed | None = None
    """set before `state` becomes COPY_FAILED or CANCELLED"""
    arrived: float = 0.0
    """end of the copy, in monotonic seconds"""
    began: float = 0.0
    """start of the first layer's transfer, in monotonic seconds"""
    bytes_before: int = 0
    """bytes of all adapters that had crossed to the device when the copy began"""
    bytes_after: int = 0
    stream: torch.cuda.Stream | None = None

    @classmethod
    def of(cls, layers: int, layer_state: int = LayerState.NO, state: DeviceState = DeviceState.COPYING) -> CopyStates:
        """Returns the states of a new copy of `layers` layers in ascending order."""
        return cls([layer_state] * layers, [None] * layers, [None] * layers, range(layers), state)

    def change_state(self, state: DeviceState) -> None:
        """Sets the state. The caller must hold the lock of the copying threads while the copy runs. Raises
        IllegalTransition unless DEVICE_TRANSITIONS has the transition."""
        check_transition(self.state, state, DEVICE_TRANSITIONS)
        self.state = state

    @property
    def abandoned(self) -> bool:
        """Returns whether the copy was cancelled because nobody wanted the adapter, whether or not it has ended yet."""
        return self.state in (DeviceState.CANCELLED, DeviceState.COPY_STOPPED, DeviceState.ABANDONED)

    @property
    def ended(self) -> bool:
        """Returns whether the copy has ended, so that the loader threads no longer use the target pages."""
        return self.state is not DeviceState.COPYING and self.state is not DeviceState.CANCELLED

    @property
    def settled(self) -> bool:
        """Returns whether the engine has recorded the end of the copy."""
        return self.state in (DeviceState.READY, DeviceState.FAILED, DeviceState.ABANDONED)


@dataclass
class DeviceAdapter:
    """Adapter that has pages on the device, and its load."""

    host: HostAdapter
    layout: AdapterLayout
    slot: int
    pages: list[int]
    run: int
    began: float
    """start of the load that brings the adapter to the device, in monotonic seconds"""
    copy: CopyStates
    leases: int = 0
    prefetched: bool = False
    """True if no request waited when the load began. The duration of such a load is not used to measure the link."""
    served: bool = False
    """whether a request was served from the adapter; its load then runs to its end, since more requests are likely"""
    load_seconds: float = 0.0
    weights: AdapterWeights | None = None
    """Set once all layers are on the device. The device's table names the adapter from the start of the copy."""

    @property
    def size(self) -> int:
        """Bytes of the adapter's pages on the device."""
        return self.layout.size

    @property
    def bytes_left(self) -> int:
        """Returns the bytes of the layers that are not on the device yet."""
        moved = zip(self.layout.moved, self.copy.layers, strict=True)
        return sum(size for size, state in moved if state != LayerState.DEVICE)

    @property
    def copied(self) -> float:
        """Returns the share of the copy's bytes that is on the device, 0 to 1."""
        return 1 - self.bytes_left / max(1, sum(self.layout.moved))

    @property
    def failure(self) -> LoadFailed | None:
        """Returns why the copy failed; None if it has not failed, or was abandoned."""
        return None if self.copy.abandoned else self.copy.failure

    @property
    def arrived(self) -> float:
        """Returns the end of the copy in monotonic seconds; 0 if it has not ended."""
        return self.copy.arrived

    @property
    def settled(self) -> bool:
        """Returns whether the load has ended, successfully or not."""
        return self.copy.settled

    @property
    def idle(self) -> bool:
        """Returns whether the adapter has no lease and its load has ended."""
        return self.leases == 0 and self.settled
