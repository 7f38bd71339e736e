"""Loads adapters with bounded pools of threads, layer by layer: store or disk to host pages, host pages to device
pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from adapters.artifact import ArtifactHeader, read_header
from adapters.base_model import BaseModel
from adapters.errors import CorruptArtifact
from adapters.store import ObjectStore
from node_agent.adapter_memory.cached_artifact import cached_header
from node_agent.adapter_memory.device_copy import DeviceCopy
from node_agent.adapter_memory.disk_cache import DiskCache
from node_agent.adapter_memory.fetch import DAMAGE, UNWANTED, Fetch
from node_agent.adapter_memory.layout import lay_out
from node_agent.adapter_memory.link import Link
from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.adapter_memory.loads import CopyStates, HostAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.ranges import FirstBytes, Staging
from node_agent.adapter_memory.tasks import Tasks
from node_agent.leases import LoadFailed
from node_agent.states import DeviceState, HostState

MEASURE_THREADS = 8
"""Number of threads that read headers and, with them, first layers (two reads per adapter). They are separate from the
fetching threads, so that headers do not wait for the bytes of large adapters."""
MEASURE_AHEAD = 2
"""Maximum prefetches whose headers are read at once. Together with the reads of their first layers, they use at most
half of the threads."""
STORE_THREADS = 8
COPY_THREADS = {"cpu": 4, "cuda": 1}
"""Number of copying threads, by device type.

One thread saturates a GPU's link, since copies are enqueued. More threads only compete with the engine's thread for the
interpreter lock. With more, four concurrent cold calls had their first tokens after 76 ms, not 50
(docs/results/gpu.md).
"""


class _Awaited:
    """Job of the fetching threads that has no work. While its adapter's header is read or waits for room, it blocks
    less urgent loads."""

    def __init__(self, host: HostAdapter) -> None:
        self.load = host

    @property
    def over(self) -> bool:
        return self.load.unwanted or self.load.state not in (HostState.READING_HEADER, HostState.WAITING_FOR_ROOM)

    def take(self, now: float, is_blocked: bool) -> None:  # noqa: ARG002 - a Job's signature
        return None

    def wake_at(self) -> None:
        return None


class Loader:
    """Loads adapters with three pools of threads. A failed load sets the state and `failure` of its adapter; it is
    never only logged."""

    def __init__(
        self,
        store: ObjectStore,
        base: BaseModel,
        host: Pool,
        device: Pool,
        store_link: Link,
        device_link: Link,
        on_change: Callable[[], None],
        cache: DiskCache | None = None,
    ) -> None:
        """`on_change` is called from a loader thread after each change that the engine may wait for."""
        self.store, self.base, self.host, self.device, self.on_change = store, base, host, device, on_change
        self.dtype = host.data.dtype
        self.store_link, self.device_link, self.cache = store_link, device_link, cache
        self._links = store_link, device_link
        self._measuring = Tasks("measure", MEASURE_THREADS, MEASURE_AHEAD)
        self.fetching = LoaderThreads("fetch", STORE_THREADS, use_one_torch_thread)
        self.copying = LoaderThreads("copy", COPY_THREADS[device.data.device.type], use_one_torch_thread)
        self.staging = Staging()
        self.crossed_bytes = 0
        """Bytes that crossed to the device since the start of the process. Changed under the lock of the copying
        threads."""
        self.bandwidth = math.inf
        """Measured bytes per second of the link to a GPU. It is infinite until measured, and on a CPU, where no pass
        waits for copies of other requests."""

    def measure(self, host: HostAdapter) -> None:
        """Starts to read the adapter's header. The read sets `host.layout`, or makes the load fail."""
        self.fetching.add(_Awaited(host))
        self._measuring.submit(host, self._measure, host)

    def fetch(self, host: HostAdapter) -> None:
        """Starts to read the weights into `host.pages`, which the caller has allocated. The header must have been
        read."""
        job = Fetch(host, self)
        with (
            self.fetching.changed
        ):  # under one lock, so that no less urgent load starts in between, or waits for a load that was removed
            host.change_state(HostState.FETCHING)
            job.settle()
            self.fetching.add(job)

    def reclaim(self, host: HostAdapter) -> None:
        """Marks a running fetch as RECLAIMED, since a more urgent load needs its room. The fetch ends once nobody wants
        the adapter."""
        with self.fetching.changed:
            if host.state is HostState.FETCHING:
                host.change_state(HostState.RECLAIMED)

    def claim(self, host: HostAdapter, states: CopyStates) -> bool:
        """Records that a copy to the device needs the host adapter, so that its load is not abandoned. Returns False if
        the load has already failed."""
        with self.fetching.changed:
            if host.failed:
                return False
            host.copy = states
            return True

    def copy(self, host: HostAdapter, pages: list[int], states: CopyStates) -> None:
        """Starts to copy an adapter to these device pages, each layer as soon as it is in host memory."""
        self.copying.add(DeviceCopy(host, pages, states, self))

    def add_crossed(self, size: int) -> None:
        """Adds bytes that crossed to the device but belong to no adapter."""
        with self.copying.changed:
            self.crossed_bytes += size

    def set_order(self, states: CopyStates, order: Sequence[int]) -> None:
        """Sets the order in which the copy takes layers that are in host memory. Raises ValueError unless `order` names
        each layer once."""
        if sorted(order) != list(range(len(states.layers))):
            raise ValueError(
                f"an order of {len(states.layers)} layers must name each of them once; it is {list(order)}"
            )
        with self.copying.changed:
            states.order = tuple(order)

    def abandon(self, states: CopyStates) -> None:
        """Cancels a copy that nobody wants any more, unless it has ended."""
        with self.copying.changed:
            if states.state is DeviceState.COPYING:
                states.failure = states.failure or UNWANTED
                states.change_state(DeviceState.CANCELLED)
        self.copying.wake()

    def wake(self) -> None:
        """Wakes the threads after the urgency of loads has changed."""
        self._measuring.wake()
        self.fetching.wake()
        self.copying.wake()

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._measuring.close(wait=False)
        self.fetching.close(wait=False)
        self.copying.close(wait=self.device.data.is_cuda)  # pinned memory is freed next
        if self.cache is not None:
            self.cache.close()

    def on_layer(self) -> None:
        self.copying.wake()
        self.on_change()

    def _measure(self, host: HostAdapter) -> None:
        try:
            header = self._cached_header(host)
            if header is None:
                first = FirstBytes(self.store, partial(self._measuring.follow, host))
                header = read_header(first, host.artifact)
                host.first = first
            if header.digest != host.digest or header.base != self.base.fingerprint:
                raise CorruptArtifact(f"{host.artifact} holds another adapter than {host.digest}")
            layout = lay_out(header, self.base, self.dtype.itemsize, self.host.page_units)
            host.here = bytearray(len(header.layers))
            host.header, host.layout = header, layout
            host.change_state(HostState.WAITING_FOR_ROOM)
        except Exception as error:  # thread boundary: any failure becomes the adapter's state
            host.end_badly(LoadFailed(f"{type(error).__name__}: {error}", isinstance(error, DAMAGE)))
            self.fetching.wake()
        self.on_change()

    def _cached_header(self, host: HostAdapter) -> ArtifactHeader | None:
        file = self.cache.open(host.digest) if self.cache is not None else None
        if file is None:
            host.origin = "absent"
            return None
        try:
            header = cached_header(file)
        except (CorruptArtifact, OSError) as error:
            file.drop(str(error))
            host.origin = "absent"
            return None
        host.cached, host.origin = file, "disk"
        return header


def use_one_torch_thread() -> None:
    """Limits torch to one thread in the calling thread alone.

    If each loader thread had a team of OpenMP threads, they would outnumber the cores. The engine's OpenMP threads
    would then sleep between two products instead of polling for the next one.
    """
    torch.get_num_threads()  # otherwise the thread's first product takes another thread's last count
    torch.set_num_threads(1)
