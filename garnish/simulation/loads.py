"""Loads of adapters to a simulated node's device.

A load is a fetch from the object store to host memory, and then a copy to the device. The fetch starts when the first
request for the adapter arrives. The copy starts when a request is admitted and the bytes are in host memory. On a real
node the copy follows the fetch layer by layer, and therefore ends earlier by nearly the duration of the copy. When
`exposed_share` of a load has arrived, a prompt is computed as if the adapter were loaded; later tokens need the
complete adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from math import inf

from cluster.node_table import ABSENT, DEVICE
from cluster.performance_model import Transfer
from garnish.simulation.job import Job
from garnish.simulation.memory import AdapterMemory, Entry
from garnish.simulation.profile import NodeProfile

BOUNDLESS = 1 << 62


class Loads:
    def __init__(self, profile: NodeProfile) -> None:
        self._all_there = profile.adapter_memory is None
        if profile.adapter_memory is None:
            self.memory = AdapterMemory(BOUNDLESS, None, BOUNDLESS)
        else:
            self.memory = AdapterMemory(profile.adapter_memory, profile.host_memory, profile.adapter_slots)
        self.store = SharedLink(profile.performance.from_store)
        self.device = SharedLink(profile.performance.to_device)
        self._share = profile.performance.exposed_share
        self._fetching: dict[str, int] = {}
        self._copying: dict[str, int] = {}
        self._fetched_enough: set[str] = set()
        """digests of the adapters being fetched of which enough has arrived to compute a prompt"""

    @property
    def next(self) -> float:
        return min(self.store.next, self.device.next)

    @property
    def loading_bytes(self) -> int:
        return self.store.bytes + self.device.bytes

    def prefetch(self, job: Job, now: float) -> int:
        """Starts to fetch the adapter of a waiting request, if necessary. Returns the adapter's current tier."""
        if job.digest is None or self._all_there:
            return DEVICE
        tier = self.memory.tier(job.digest)
        if tier == ABSENT:
            self._fetch(job.digest, job.bytes, now)
        else:
            self.memory.touch(job.digest)
        return tier

    def is_ready(self, job: Job) -> bool:
        """Returns True if the request's adapter is complete on the device, or the request needs none."""
        if job.digest is None or self._all_there:
            return True
        entry = self.memory.device.get(job.digest)
        return entry is not None and entry.is_complete

    def has_room(self, job: Job) -> bool:
        return job.digest is None or self._all_there or job.digest in self.memory.device

    def lease(self, job: Job, now: float) -> bool:
        """Takes a lease on the request's adapter, and starts its load if necessary.

        Returns False if there is no room on the device.
        """
        if job.digest is None:
            return True
        was_there = job.digest in self.memory.device
        entry = self.memory.lease(job.digest, job.bytes)
        if entry is None:
            return False
        job.entry = entry
        if was_there:
            return True
        if self._all_there:
            self.memory.arrived(job.digest)
        elif self.memory.in_host(job.digest):
            self._copy(entry, now, self._share)
        else:
            self._fetch(job.digest, job.bytes, now)  # evicted from host memory while the request waited
            entry.ready = job.digest in self._fetched_enough
        return True

    def release(self, job: Job) -> None:
        if job.entry is not None:
            self.memory.release(job.entry)
            job.entry = None

    def advance(self, now: float) -> bool:
        """Processes the transfers up to the time `now`.

        Returns True if a request that waited for an adapter may continue.
        """
        moved = False
        if self.store.next <= now:
            for what, digest in self.store.reached(now, self._fetching):
                moved = self._fetched(what, digest, now) or moved
        if self.device.next <= now:
            for what, digest in self.device.reached(now, self._copying):
                moved = True
                if what == "end":
                    del self._copying[digest]
                    self.memory.arrived(digest)
                else:
                    self.memory.device[digest].ready = True
        return moved

    def _fetched(self, what: str, digest: str, now: float) -> bool:
        entry = self.memory.device.get(digest)
        if what == "ready":
            self._fetched_enough.add(digest)
            if entry is not None:
                entry.ready = True
            return entry is not None
        self._fetched_enough.discard(digest)
        self.memory.keep_in_host(digest, self._fetching.pop(digest))
        if entry is not None:
            self._copy(entry, now, 0.0)  # the exposed share was already fetched
        return False

    def _fetch(self, digest: str, size: int, now: float) -> None:
        if digest not in self._fetching:
            self._fetching[digest] = size
            self.store.start(digest, size, now, self._share)

    def _copy(self, entry: Entry, now: float, share: float) -> None:
        self._copying[entry.digest] = entry.bytes
        self.device.start(entry.digest, entry.bytes, now, share)


class SharedLink:
    """A simulated link that divides its bandwidth equally among its active transfers.

    Latency is modelled as additional bytes. `_moved` is the number of bytes that a transfer active from time 0 would
    have moved. A transfer of n bytes ends when `_moved` has grown by n since its start, regardless of other transfers.
    """

    def __init__(self, speed: Transfer) -> None:
        self.speed = speed
        self.bytes = 0
        self._active = 0
        self._moved = 0.0
        self._at = 0.0
        self._marks: list[tuple[float, int, str, str]] = []
        """heap of events as (value of `_moved` in bytes at which the event occurs, order of insertion, "ready" or
        "end", name of the transfer)"""
        self._order = 0

    def start(self, name: str, size: int, now: float, ready_share: float) -> None:
        """Starts a transfer of `size` bytes.

        `reached` then returns the events ("ready", name), when the share `ready_share` has arrived, and ("end", name).
        """
        self._move(now)
        cost = size + self.speed.latency * self.speed.bandwidth
        self._mark(self._moved + ready_share * cost, "ready", name)
        self._mark(self._moved + cost, "end", name)
        self._active += 1
        self.bytes += size

    @property
    def next(self) -> float:
        """Simulated time in seconds at which the next event of `reached` occurs, if no other transfer starts before;
        inf if there is no transfer."""
        if not self._marks:
            return inf
        return self._at + max(0.0, self._marks[0][0] - self._moved) * self._active / self.speed.bandwidth

    def reached(self, now: float, sizes: Mapping[str, int]) -> list[tuple[str, str]]:
        """Returns the events that occur until the time `now`, in order, as ("ready" or "end", name of the transfer).

        `sizes` has the bytes of each active transfer by name.
        """
        marks: list[tuple[str, str]] = []
        while (time := self.next) <= now:
            mark, _, what, name = heappop(self._marks)
            self._at, self._moved = time, max(mark, self._moved)
            if what == "end":
                self._active -= 1
                self.bytes -= sizes[name]
            marks.append((what, name))
        return marks

    def _move(self, now: float) -> None:
        if self._active:
            self._moved += (now - self._at) * self.speed.bandwidth / self._active
        self._at = now

    def _mark(self, moved: float, what: str, name: str) -> None:
        self._order += 1
        heappush(self._marks, (moved, self._order, what, name))
