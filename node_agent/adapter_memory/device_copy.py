"""Copies one adapter from host memory to the device, each layer as soon as it is in host memory.

A thread takes only layers that are in host memory, so a slow store does not block a copy. It takes several layers at
once, since a layer of a small adapter crosses faster than the thread can enqueue it. On a GPU a few portions are
enqueued ahead, so that the link does not stall between them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory.layout import joined_spans
from node_agent.adapter_memory.link import Link
from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.adapter_memory.loads import CopyStates, HostAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.weights import LayerViews
from node_agent.device import record_event
from node_agent.device_event import Event
from node_agent.leases import LayerState, LoadFailed
from node_agent.states import DeviceState

AHEAD = 2
"""Number of portions of a load that may be enqueued after the one that is being transferred.

It is small, because a pass whose stream waits for a portion also waits for the earlier portions of all loads.
"""
PORTION_BYTES = 8 << 20
"""Maximum bytes of a portion: layers that are enqueued together. A single larger layer is a portion too."""
PORTION_S = 150e-6
"""Maximum seconds that the transfer of a portion may take on a GPU's link. On PCIe 5, PORTION_BYTES take this long."""


class CopyTools(Protocol):
    """Attributes of a Loader that its copies use."""

    base: BaseModel
    host: Pool
    device: Pool
    device_link: Link
    copying: LoaderThreads
    on_change: Callable[[], None]
    crossed_bytes: int
    bandwidth: float


class DeviceCopy:
    """Job of the copying threads for one adapter."""

    def __init__(self, host: HostAdapter, pages: list[int], states: CopyStates, loader: CopyTools) -> None:
        assert host.layout is not None and host.pages is not None  # its header was read and it has pages
        self.load = self.host = host
        self.layout, self.host_pages = host.layout, host.pages
        self.source, self.target, self.pages, self.base = loader.host, loader.device, pages, loader.base
        self.states, self.link, self.threads = states, loader.device_link, loader.copying
        self.loader, self.on_change = loader, loader.on_change
        self.positions = host.layout.positions(pages)
        self.over = False
        self._running = False
        self._crossing: deque[tuple[list[int], Event]] = deque()
        """enqueued portions (lists of layers) with the events after their copies; only the thread that runs `_work`
        uses it"""
        if self.target.data.is_cuda:  # a separate stream, so that copies overlap with the engine's work
            states.stream = torch.cuda.Stream(self.target.data.device)  # type: ignore[no-untyped-call]

    # --- methods of a Job, called under the threads' lock

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:
        if self._running or self.over:
            return None
        states = self.states.layers
        failed = self.host.failed or self.states.failure is not None
        uncopied = [] if failed else [layer for layer in self.states.order if states[layer] == LayerState.NO]
        if not uncopied and not self._crossing:
            self._settle()
            return None
        portion = self._portion([layer for layer in uncopied if self.host.here[layer]]) if not is_blocked else []
        if not portion and not self._crossing:
            return None
        self._running = True
        if not self.states.began:
            self.states.began, self.states.bytes_before = now, self.loader.crossed_bytes
        return partial(self._work, portion)

    def wake_at(self) -> float | None:
        """Returns None, since only newly arrived layers make new work."""
        return None

    @property
    def portion_bytes(self) -> int:
        """Returns the maximum bytes of a portion. Returns 0, which means one layer at a time, over a simulated link."""
        if not isinstance(self.link, Link) or self.link.config is not None:
            return 0
        return int(min(PORTION_BYTES, self.loader.bandwidth * PORTION_S))

    def _portion(self, layers: list[int]) -> list[int]:
        """Returns the next portion: the first of `layers`, as many as may be enqueued together."""
        sizes, max_bytes = accumulate(self.layout.moved[layer] for layer in layers), self.portion_bytes
        return layers[: max(1, sum(size <= max_bytes for size in sizes))]

    def _settle(self) -> None:
        """Marks the copy as ended, with its final state: copied, failed or stopped. Does not wait: call it only when no
        portion is being transferred."""
        states = self.states
        self.over, states.arrived = True, time.monotonic()
        states.bytes_after = self.loader.crossed_bytes
        states.failure = states.failure or self.host.failure
        if states.state is DeviceState.CANCELLED:
            states.change_state(DeviceState.COPY_STOPPED)
        else:
            states.change_state(DeviceState.COPIED if states.failure is None else DeviceState.COPY_FAILED)

    # --- in a loader thread

    def _work(self, portion: list[int]) -> None:
        """Enqueues the copy of these layers. Then waits for the oldest enqueued portion if `portion` is empty, or if
        more than AHEAD portions are enqueued."""
        states, crossed_bytes = self.states, 0
        try:
            if portion:
                self._enqueue(portion)
            if self._crossing and (not portion or len(self._crossing) > AHEAD):
                self._crossing[0][1].synchronize()
            crossed_bytes = self._take_arrivals()
        except Exception as error:  # thread boundary: any failure becomes the load's state
            states.failure = LoadFailed(str(error) or type(error).__name__)
            if states.stream is not None:
                with suppress(RuntimeError):  # the failed copy was already recorded
                    states.stream.synchronize()
            self._crossing.clear()
        with self.threads.changed:
            self._running = False
            self.loader.crossed_bytes += crossed_bytes
            is_complete = all(state == LayerState.DEVICE for state in states.layers)
            if not self._crossing and (states.failure is not None or is_complete):
                self._settle()
        self.on_change()

    def _enqueue(self, portion: list[int]) -> None:
        states = self.states
        self.link.carry(sum(self.layout.moved[layer] for layer in portion))
        with torch.cuda.stream(states.stream):
            for span in joined_spans([span for layer in portion for span in self.layout.spans[layer]]):
                rows = self.source.span(self.host_pages[span.page], span)
                self.target.span(self.pages[span.page], span).copy_(rows, non_blocking=True)
            event = record_event(self.target.data.device)
        for layer in portion:
            views = LayerViews(self.target, self.positions, self.layout.layers[layer], self.base)
            if not self.target.data.is_cuda:
                views.make()  # here rather than in the engine's thread, which uses them
            states.events[layer], states.views[layer] = event, views
            states.layers[layer] = LayerState.ENQUEUED
        self._crossing.append((portion, event))

    def _take_arrivals(self) -> int:
        """Marks the layers whose copies have ended as on the device. Returns their bytes."""
        size = 0
        while self._crossing and self._crossing[0][1].query():
            for layer in self._crossing.popleft()[0]:
                self.states.layers[layer] = LayerState.DEVICE
                size += int(self.layout.moved[layer])
        return size
