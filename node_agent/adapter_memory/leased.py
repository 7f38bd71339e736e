"""States, weights and load times of leased adapters, as the engine reads them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from adapters.base_model import BaseModel
from node_agent.adapter_memory.host import HostTier
from node_agent.adapter_memory.layout import AdapterLayout
from node_agent.adapter_memory.loads import DeviceAdapter
from node_agent.adapter_memory.weights import AdapterWeights, ArrivingWeights, LayerWeights
from node_agent.leases import LayerState, Lease, LoadFailed


class LeasedAdapters:
    """Adapters on the device, as requests with a lease read them. AdapterStore grants the leases."""

    base: BaseModel
    device: Mapping[str, DeviceAdapter]
    """adapters that have pages on the device, by digest"""
    hosts: HostTier

    def layout(self, lease: Lease) -> AdapterLayout:
        """Returns the layout of the leased adapter on the device."""
        return self.device[lease.digest].layout

    def state(self, lease: Lease, layer: int) -> int:
        """Returns the layer's LayerState."""
        entry = self.device[lease.digest]
        if entry.copy.failure is not None:
            return LayerState.FAILED
        state = entry.copy.layers[layer]
        if state != LayerState.NO:
            return state
        return LayerState.HOST if entry.host.here[layer] else LayerState.NO

    def loaded(self, lease: Lease) -> bool:
        """Returns whether all layers of the leased adapter are on the device."""
        return self.ready(lease.digest)

    def ready(self, digest: str) -> bool:
        """Returns whether all layers of the adapter are on the device."""
        entry = self.device.get(digest)
        return entry is not None and entry.weights is not None

    def failure(self, lease: Lease) -> LoadFailed | None:
        """Returns why the adapter's load failed; None if it has not failed."""
        return self.device[lease.digest].copy.failure

    def source(self, lease: Lease) -> str:
        """Returns the tier that a leased adapter is loaded from: host, disk, or absent (the object store)."""
        entry = self.device[lease.digest]
        return "host" if entry.host.complete and entry.began > entry.host.began else entry.host.origin

    def load_seconds(self, lease: Lease) -> float:
        """Returns the seconds that the adapter's load took; 0 while it runs."""
        return self.device[lease.digest].load_seconds

    def crossing(self, lease: Lease) -> tuple[int, float]:
        """Returns (bytes, seconds): all bytes that crossed the link during the adapter's copy, and the copy's duration.
        The bytes include those of other adapters.

        Returns zeros for a load that began as a prefetch. The link may then have been idle while the prefetch yielded
        to loads that had no bytes in host memory yet.
        """
        entry = self.device[lease.digest]
        if entry.prefetched:
            return 0, 0.0
        copy = entry.copy
        return copy.bytes_after - copy.bytes_before, copy.arrived - copy.began

    def fetch_seconds(self, lease: Lease) -> float:
        """Returns the seconds from the start of the load until its latest layer reached host memory. Returns 0 if all
        layers were in host memory at the start. Once the adapter is loaded, this is the duration of its fetch."""
        entry = self.device[lease.digest]
        return max(0.0, entry.host.arrived - entry.began)

    def host_seconds(self, lease: Lease, layer: int) -> float:
        """Returns the expected seconds until layers 0 to `layer` are in host memory, at the rate of recent loads."""
        host = self.device[lease.digest].host
        return self.hosts.rates.seconds(host.origin, host.bytes_left(layer))

    def weights(self, lease: Lease) -> AdapterWeights:
        """Returns the adapter's weights by layer. Accessing a layer that is not on the device yet raises
        RuntimeError."""
        return self.device[lease.digest].weights or ArrivingWeights(
            self.base.num_layers, partial(self.layer_weights, lease)
        )

    def layer_weights(self, lease: Lease, layer: int) -> LayerWeights:
        """Returns the weights of one layer that is on the device. Raises RuntimeError when it is not.

        The layer stays readable if the load fails at a later layer: a pass may be using it, and it was verified. A
        layer that is only ENQUEUED may be read on the stream after `await_copy`.
        """
        copy = self.device[lease.digest].copy
        views = copy.views[layer]
        if views is None or copy.layers[layer] not in (LayerState.ENQUEUED, LayerState.DEVICE):
            raise RuntimeError(f"layer {layer} of adapter {lease.digest} is read before it is on the device")
        return views

    def await_copy(self, lease: Lease, layer: int) -> None:
        """Makes work enqueued on the current stream from now on wait for the copy of an ENQUEUED layer. Returns at
        once."""
        event = self.device[lease.digest].copy.events[layer]
        if event is not None:
            event.wait()
