"""Reads one adapter from the store or the disk cache into host memory, in ranges of layers. Each layer is verified
separately.

Several ranges are read at once. After a failed read or a corrupt layer, the range is read again from that layer on,
after a pause. Layers that have arrived before it are kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch

from adapters.artifact import check_layer
from adapters.base_model import BaseModel
from adapters.errors import CorruptArtifact, NotFound, StoreUnavailable
from adapters.store import ObjectStore
from node_agent.adapter_memory.cached_artifact import artifact_writer
from node_agent.adapter_memory.disk_cache import CachedFile, CacheWriter, DiskCache
from node_agent.adapter_memory.layout import contiguous_runs, row_units
from node_agent.adapter_memory.link import Flow, Link, Transfer
from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.adapter_memory.loads import HostAdapter
from node_agent.adapter_memory.pool import Pool
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.ranges import LARGEST_RANGE, Range, Staging, plan_ranges
from node_agent.device import DTYPES
from node_agent.leases import LoadFailed
from node_agent.states import HostState

RANGES_IN_FLIGHT = 3
TRIES = 3
BACK_OFF = 0.05
"""Seconds before the second attempt to read a range; the third waits four times as long."""
RETRIED = (StoreUnavailable, CorruptArtifact, OSError)
DAMAGE = (CorruptArtifact, NotFound)
"""Errors that mean the artifact in the store is missing or corrupt."""
UNWANTED = LoadFailed("nobody waits for it any more")

Land = Callable[[memoryview, int], None]
"""Function of a range's buffer and the number of its bytes that have arrived."""


class _GivenUp(Exception):
    """Internal exception: the load has failed elsewhere, or nobody wants it any more."""


class FetchTools(Protocol):
    """Part of a Loader that its fetches use."""

    store: ObjectStore
    base: BaseModel
    host: Pool
    fetching: LoaderThreads
    store_link: Link
    staging: Staging
    cache: DiskCache | None

    def on_layer(self) -> None:
        """Reports that a layer has arrived, or that the load has ended. At the end of the load it is called under the
        lock of the fetching threads."""


class Fetch:
    """Work of the fetching threads for one adapter. It sets the final `state` of `host` once no thread uses the
    adapter's pages."""

    def __init__(self, host: HostAdapter, loader: FetchTools) -> None:
        assert (
            host.header is not None and host.layout is not None and host.pages is not None
        )  # its header was read and it has pages
        self.load = self.host = host
        self.header, self.layout = host.header, host.layout
        self.store, self.base, self.pool, self.threads = loader.store, loader.base, loader.host, loader.fetching
        self.link, self.flow, self.staging, self.on_change = loader.store_link, Flow(), loader.staging, loader.on_layer
        self.cache = loader.cache if host.cached is None else None
        """disk cache to write verified layers to; None once a writer was requested"""
        self.positions = host.layout.positions(host.pages)
        self.over = False
        self._first, host.first = host.first, None
        self._ranges = plan_ranges(host.header.layers, self._first.size if self._first else 0)
        self._running = 0
        self._error: LoadFailed | None = None
        self._writer: CacheWriter | None = None
        self._writer_lock = threading.Lock()
        host.here = bytearray(not block.size for block in host.header.layers)

    # --- methods of a Job, called under the threads' lock

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:
        if self.over:
            return None
        if self._error is not None or self.host.given_up:
            self.settle()
            return None
        ready = next((r for r in self._ranges if r.not_before <= now), None)
        if is_blocked or ready is None or self._running >= self._max_in_flight:
            return None
        self._ranges.remove(ready)
        self._running += 1
        source = self.host.cached
        layers = self.header.layers[ready.first : ready.end] if source is None else ()
        transfers = [self.link.begin(self.flow, block.size) for block in layers]  # in layer order
        return partial(self._bring, ready, source, transfers)

    def wake_at(self) -> float | None:
        later = [r.not_before for r in self._ranges if r.not_before]
        return min(later) if later and self._running < self._max_in_flight else None

    @property
    def _max_in_flight(self) -> int:
        """Maximum number of ranges that are read at once. A prefetch reads one at a time, so that few of its bytes
        delay a later request."""
        return RANGES_IN_FLIGHT if self.host.priority == Priority.REQUEST else 1

    def settle(self) -> None:
        """Sets the final state of a load once it has ended and no read runs. Until then, callers see the load as
        running."""
        if self._running or self.over:
            return
        complete = all(self.host.here)
        abandoned = self._error is None and self.host.given_up
        if not (complete or self._error is not None or abandoned):
            return
        self.over = True
        self.link.leave(self.flow)
        if self._writer is not None:
            self._writer.end()
        if complete:
            self._complete()
        elif self._error is not None:
            self.host.end_badly(self._error)
        else:
            self.host.end_badly(UNWANTED, HostState.ABANDONED)
        self.on_change()

    def _complete(self) -> None:
        if not self.host.complete:  # the last layer may have set it already
            self.host.change_state(HostState.COMPLETE)

    # --- in a loader thread; each layer is placed as soon as its last byte has arrived, while later ones are read

    def _bring(self, part: Range, source: CachedFile | None, transfers: list[Transfer]) -> None:
        at = part.first

        def land(data: memoryview, count: int) -> None:
            """Verifies and copies all layers of the range that are complete in `data`. `count`: number of its first
            bytes that have arrived."""
            nonlocal at
            while at < part.end:
                block = self.header.layers[at]
                end = block.offset + block.size - part.start if block.size else 0
                if end > count:
                    return
                if source is None:
                    self.link.wait(transfers[at - part.first])
                if self._error is not None or self.host.given_up:
                    raise _GivenUp
                if block.size:
                    self._land(at, data[end - block.size : end], keep=source is None)
                at += 1

        try:
            self._read(part, source, land)
        except _GivenUp:
            self._put_back(part, at)
        except Exception as error:  # thread boundary: any failure becomes the load's state
            if at < part.end:  # otherwise the failure was after the range, in the artifact's first bytes
                self._record_failure(error, part, at, source)
        with self.threads.changed:
            self._running -= 1
            self.settle()

    def _read(self, part: Range, source: CachedFile | None, land: Land) -> None:
        if self._first is not None and part.start + part.size <= self._first.size:  # a range that is
            first, self._first = self._first, None  # tried again is read from the store
            data = first.data[part.start : part.start + part.size]
            if first.read(lambda count: land(data, count - part.start)) - part.start >= part.size:
                return
        data = self.staging.take(part.size)
        for low in range(0, part.size, LARGEST_RANGE):
            piece = data[low : low + LARGEST_RANGE]
            start = part.start + low
            if source is None:
                landing = partial(_land_after_earlier_pieces, land, data, low)
                size = self.store.get_range_into(self.host.artifact, start, piece, landing)
            else:
                size = source.read_into(start, piece)
            if size != len(piece):
                raise CorruptArtifact(
                    f"artifact {self.header.digest} ends at byte {start + size}, before its last layer"
                )
            land(data, low + size)

    def _land(self, layer: int, block: memoryview, keep: bool) -> None:
        """Verifies a layer, copies its rows to the pages, and marks it as arrived."""
        check_layer(self.header, layer, block)
        for pair in self.layout.layers[layer]:
            d_in, d_out = self.base.widths[pair.projection]
            self._place(self.positions[pair.a : pair.a + pair.rank], block, pair.a_source, d_in)
            self._place(self.positions[pair.b : pair.b + pair.rank], block, pair.b_source, d_out)
        with self.threads.changed:
            self.host.here[layer] = 1
            self.host.arrived = time.monotonic()
            if all(self.host.here):
                self._complete()
        self.on_change()
        writer = self._open_writer() if keep else None
        if writer is not None:
            writer.write(self.header.layers[layer].offset, block)

    def _open_writer(self) -> CacheWriter | None:
        with self._writer_lock:
            if self.cache is not None:
                self._writer, self.cache = artifact_writer(self.cache, self.header), None  # requested only once
            return self._writer

    def _place(self, positions: np.ndarray, block: memoryview, offset: int, width: int) -> None:
        """Copies rows of `width` elements from byte `offset` of the block to `positions`, converted to the pool's
        dtype."""
        source, count = DTYPES[self.header.dtype], len(positions) * width
        rows = torch.frombuffer(block, dtype=source, count=count, offset=offset).view(len(positions), width)
        for low, end in contiguous_runs(positions, row_units(width, self.pool.data.element_size())):
            self.pool.matrix(int(positions[low]), end - low, width).copy_(rows[low:end])

    def _record_failure(self, error: Exception, part: Range, at: int, source: CachedFile | None) -> None:
        """Handles a failed read of a range. Schedules another attempt from layer `at`, or ends the load if `error` is
        final or attempts are used up."""
        again = self._rest(part, at)
        with self.threads.changed:
            if source is not None and isinstance(error, RETRIED):
                source.drop(str(error))  # fall back to the store
                self.host.cached = None
                again.tries = part.tries
            elif not isinstance(error, RETRIED) or again.tries >= TRIES:
                if self._error is None:
                    damaged = source is None and isinstance(error, DAMAGE)
                    self._error = LoadFailed(f"{type(error).__name__}: {error}", damaged)
                return
            else:
                again.not_before = time.monotonic() + BACK_OFF * 4 ** (again.tries - 1)
            self._ranges.insert(0, again)

    def _put_back(self, part: Range, at: int) -> None:
        rest = self._rest(part, at)
        rest.tries = part.tries
        with self.threads.changed:
            self._ranges.insert(0, rest)

    def _rest(self, part: Range, at: int) -> Range:
        start = self.header.layers[at].offset
        tries = part.tries + 1 if at == part.first else 1
        return Range(at, part.end, start, part.start + part.size - start, tries)


def _land_after_earlier_pieces(land: Land, data: memoryview, before: int, count: int) -> None:
    land(data, before + count)
