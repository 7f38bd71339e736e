"""Moves adapters: object store -> host pages, and host pages -> device pages, layer by layer, in bounded workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from adapters.artifact import ArtifactHeader, LayerBlock, read_header, read_layer
from adapters.base_model import BaseModel
from adapters.store import ObjectStore
from node_agent.adapter_memory.layout import ROW_ALIGN, AdapterLayout, contiguous_runs, lay_out, row_units
from node_agent.adapter_memory.link import Link
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.weights import AdapterWeights, view_weights
from node_agent.device import DTYPES

MEASURE_WORKERS = 2
"""Headers are small: they must not wait behind the bytes of large adapters."""
STORE_WORKERS = 4
COPY_WORKERS = 2


class Abandoned(Exception):
    """A load ended early because nobody wanted it any more."""


@dataclass
class HostAdapter:
    """One adapter in host memory, in the pool's dtype and row order. `ready` counts layers that have arrived.

    The engine's thread writes `waiters`, `placed` and `pages` (which a worker fills); workers write the rest.
    """

    digest: str
    artifact: str
    waiters: int = 0
    """queued requests that want it"""
    placed: bool = False
    """the device is to copy from it"""
    began: float = field(default_factory=time.monotonic)
    header: ArtifactHeader | None = None
    layout: AdapterLayout | None = None
    pages: list[int] | None = None
    ready: int = 0
    failed: str = ""
    abandoned: bool = False
    """`failed` because nobody wanted it any more"""

    @property
    def unwanted(self) -> bool:
        return not self.waiters and not self.placed

    @property
    def complete(self) -> bool:
        return self.layout is not None and self.ready == len(self.layout.layers)

    @property
    def size(self) -> int:
        return self.layout.size if self.layout else 0


@dataclass
class CopyStates:
    """How far one copy to the device is. Written by its worker, read by the engine."""

    arrived: int = 0
    """Layers wholly on the device."""
    failed: str = ""
    positions: np.ndarray | None = None
    """Set with `views` when the whole adapter is there: where its rows are in the device pool."""
    views: AdapterWeights | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    """The worker touches the target no more."""


class Loader:
    """Three pools of worker threads. Failures end in `failed` of what was being loaded, never in a log alone."""

    def __init__(
        self,
        store: ObjectStore,
        base: BaseModel,
        host: Pool,
        device: Pool,
        store_link: Link,
        device_link: Link,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called from a worker when something that the engine may wait for has changed."""
        self.store, self.base, self.host, self.device, self.on_change = store, base, host, device, on_change
        self.dtype = host.data.dtype
        self.store_link, self.device_link = store_link, device_link
        self._measuring = ThreadPoolExecutor(MEASURE_WORKERS, "measure")
        self._fetching = ThreadPoolExecutor(STORE_WORKERS, "fetch")
        self._copying = ThreadPoolExecutor(COPY_WORKERS, "copy")
        self._closed = threading.Event()

    def measure(self, host: HostAdapter) -> None:
        """Start to read the adapter's header; `host.layout` is its outcome."""
        self._measuring.submit(self._guarded, host, self._measure)

    def fetch(self, host: HostAdapter) -> None:
        """Start to bring a measured adapter's weights to `host.pages`, which the caller has taken."""
        self._fetching.submit(self._guarded, host, self._fetch)

    def copy(self, host: HostAdapter, pages: list[int], states: CopyStates) -> None:
        """Start to copy an adapter that is wholly in host memory to these pages of the device."""
        self._copying.submit(self._copy, host, pages, states)

    def close(self) -> None:
        self._closed.set()
        self._measuring.shutdown(wait=False, cancel_futures=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._copying.shutdown(wait=self.device.data.is_cuda, cancel_futures=True)  # then pinned memory can be given up

    def _guarded(self, host: HostAdapter, work: Callable[[HostAdapter], None]) -> None:
        try:
            work(host)
        except Exception as error:  # the border of a worker: whatever failed becomes the adapter's state
            host.abandoned = isinstance(error, Abandoned)
            host.failed = f"{type(error).__name__}: {error}"
        self.on_change()

    def _measure(self, host: HostAdapter) -> None:
        header = read_header(self.store, host.artifact)
        if header.digest != host.digest or header.base != self.base.fingerprint:
            raise ValueError(f"{host.artifact} holds another adapter than {host.digest}")
        host.header, host.layout = header, lay_out(header, self.base, self.dtype.itemsize, self.host.page_units)

    def _fetch(self, host: HostAdapter) -> None:
        assert host.header is not None and host.layout is not None and host.pages is not None  # measured before
        positions = host.layout.positions(host.pages)
        for index, block in enumerate(host.header.layers):
            if self._closed.is_set():
                raise RuntimeError("the node is stopping")
            if host.unwanted:
                raise Abandoned("nobody waits for it any more")
            self._fetch_layer(host, host.header, positions, index, block)
            host.ready = index + 1

    def _fetch_layer(
        self, host: HostAdapter, header: ArtifactHeader, positions: np.ndarray, index: int, block: LayerBlock
    ) -> None:
        if not block.size:
            return
        raw = np.frombuffer(read_layer(self.store, host.artifact, header, index), dtype=np.uint8)
        self.store_link.carry(block.size)
        assert host.layout is not None  # measured before
        source = DTYPES[header.dtype]
        for pair in host.layout.layers[index]:
            d_in, d_out = self.base.widths[pair.projection]
            self._place(positions[pair.a : pair.a + pair.rank], raw, source, pair.a_source, d_in)
            self._place(positions[pair.b : pair.b + pair.rank], raw, source, pair.b_source, d_out)

    def _place(self, positions: np.ndarray, raw: np.ndarray, source: torch.dtype, offset: int, width: int) -> None:
        """Rows of `width` from byte `offset` of the block go to `positions`, converted to the pool's dtype."""
        size = len(positions) * width * source.itemsize
        rows = torch.from_numpy(raw[offset : offset + size].copy()).view(source).view(len(positions), width)
        for low, end in contiguous_runs(positions, row_units(width, self.dtype.itemsize)):
            self.host.matrix(int(positions[low]), end - low, width).copy_(rows[low:end])

    def _copy(self, host: HostAdapter, pages: list[int], states: CopyStates) -> None:
        try:
            assert host.layout is not None and host.pages is not None  # it is complete
            stream = _stream(self.device.data)
            for layer, spans in enumerate(host.layout.spans):
                if self._closed.is_set():
                    raise RuntimeError("the node is stopping")
                self.device_link.carry(sum(span.end - span.begin for span in spans) * ROW_ALIGN)
                with torch.cuda.stream(stream):
                    for span in spans:
                        source = self.host.span(host.pages[span.page], span)
                        self.device.span(pages[span.page], span).copy_(source, non_blocking=True)
                if stream is not None:
                    stream.synchronize()
                states.arrived = layer + 1
            states.positions = host.layout.positions(pages)
            states.views = view_weights(self.device, states.positions, host.layout, self.base)
        except Exception as error:  # the border of a worker: whatever failed becomes the adapter's state
            states.failed = str(error) or type(error).__name__
        finally:
            states.ended.set()
            self.on_change()


def _stream(data: torch.Tensor) -> torch.cuda.Stream | None:
    """A stream of the copy's own, so that it runs beside the engine's; None on a CPU."""
    if not data.is_cuda:
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
    return stream
