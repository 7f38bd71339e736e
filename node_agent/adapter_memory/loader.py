"""Moves adapters: object store -> host memory, and host memory -> device pool, layer by layer, in bounded workers."""

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
from node_agent.adapter_memory.layout import ROW_ALIGN, AdapterLayout, PairRows, lay_out, row_units
from node_agent.adapter_memory.link import Link
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

    The engine's thread writes `waiters`, `placed` and `data` (which a worker fills, and drops when it fails); workers
    write the rest.
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
    data: torch.Tensor | None = None
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
    ended: threading.Event = field(default_factory=threading.Event)
    """The worker touches the target no more."""


class Loader:
    """Three pools of worker threads. Failures end in `failed` of what was being loaded, never in a log alone."""

    def __init__(
        self,
        store: ObjectStore,
        base: BaseModel,
        dtype: torch.dtype,
        store_link: Link,
        device_link: Link,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called from a worker when something that the engine may wait for has changed."""
        self.store, self.base, self.dtype, self.on_change = store, base, dtype, on_change
        self.store_link, self.device_link = store_link, device_link
        self._measuring = ThreadPoolExecutor(MEASURE_WORKERS, "measure")
        self._fetching = ThreadPoolExecutor(STORE_WORKERS, "fetch")
        self._copying = ThreadPoolExecutor(COPY_WORKERS, "copy")
        self._closed = threading.Event()

    def measure(self, host: HostAdapter) -> None:
        """Start to read the adapter's header; `host.layout` is its outcome."""
        self._measuring.submit(self._guarded, host, self._measure)

    def fetch(self, host: HostAdapter) -> None:
        """Start to bring a measured adapter's weights to `host.data`, which the caller has made room for."""
        self._fetching.submit(self._guarded, host, self._fetch)

    def copy(self, host: HostAdapter, target: torch.Tensor, states: CopyStates) -> None:
        """Start to copy an adapter that is wholly in host memory to `target` (flat, of the layout's size)."""
        self._copying.submit(self._copy, host, target, states)

    def close(self) -> None:
        self._closed.set()
        self._measuring.shutdown(wait=False, cancel_futures=True)
        self._fetching.shutdown(wait=False, cancel_futures=True)
        self._copying.shutdown(wait=False, cancel_futures=True)

    def _guarded(self, host: HostAdapter, work: Callable[[HostAdapter], None]) -> None:
        try:
            work(host)
        except Exception as error:  # the border of a worker: whatever failed becomes the adapter's state
            host.data = None
            host.abandoned = isinstance(error, Abandoned)
            host.failed = f"{type(error).__name__}: {error}"
        self.on_change()

    def _measure(self, host: HostAdapter) -> None:
        header = read_header(self.store, host.artifact)
        if header.digest != host.digest or header.base != self.base.fingerprint:
            raise ValueError(f"{host.artifact} holds another adapter than {host.digest}")
        host.header, host.layout = header, lay_out(header, self.base, self.dtype.itemsize)

    def _fetch(self, host: HostAdapter) -> None:
        assert host.header is not None  # measured before
        for index, block in enumerate(host.header.layers):
            if self._closed.is_set():
                raise RuntimeError("the node is stopping")
            if host.unwanted:
                raise Abandoned("nobody waits for it any more")
            self._fetch_layer(host, host.header, index, block)
            host.ready = index + 1

    def _fetch_layer(self, host: HostAdapter, header: ArtifactHeader, index: int, block: LayerBlock) -> None:
        if not block.size:
            return
        raw = np.frombuffer(read_layer(self.store, host.artifact, header, index), dtype=np.uint8)
        self.store_link.carry(block.size)
        assert host.layout is not None and host.data is not None  # set before the first layer
        source = DTYPES[header.dtype]
        for pair in host.layout.layers[index]:
            d_in, d_out = self.base.widths[pair.projection]
            self._place(host.data, raw, source, pair, pair.a, pair.a_source, d_in)
            self._place(host.data, raw, source, pair, pair.b, pair.b_source, d_out)

    def _place(
        self, data: torch.Tensor, raw: np.ndarray, source: torch.dtype, pair: PairRows, at: int, offset: int, width: int
    ) -> None:
        """Rows [rank, width] at byte `offset` of the block go to unit `at`, converted to the pool's dtype."""
        size = pair.rank * width * source.itemsize
        rows = torch.from_numpy(raw[offset : offset + size].copy()).view(source).view(pair.rank, width)
        per_unit = ROW_ALIGN // self.dtype.itemsize
        stride = row_units(width, self.dtype.itemsize) * per_unit
        data.as_strided((pair.rank, width), (stride, 1), at * per_unit).copy_(rows)

    def _copy(self, host: HostAdapter, target: torch.Tensor, states: CopyStates) -> None:
        try:
            assert host.layout is not None and host.data is not None  # it is complete
            per_unit = ROW_ALIGN // self.dtype.itemsize
            starts = host.layout.layer_start
            for layer in range(len(host.layout.layers)):
                begin, end = starts[layer] * per_unit, starts[layer + 1] * per_unit
                self.device_link.carry((end - begin) * self.dtype.itemsize)
                target[begin:end].copy_(host.data[begin:end])
                states.arrived = layer + 1
        except Exception as error:  # the border of a worker: whatever failed becomes the adapter's state
            states.failed = str(error) or type(error).__name__
        finally:
            states.ended.set()
            self.on_change()
