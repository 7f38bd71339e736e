"""Host tier of a node with vLLM: adapters as PEFT folders in memory-backed files.

The two original files of an adapter are fetched by their hashes, or read from the disk cache, checked, and laid out in
a form that vLLM loads. vLLM reads an adapter from its folder when it is loaded into a slot.
"""

from __future__ import annotations

import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable
from pathlib import Path

from adapters.store import ObjectStore
from cluster.messages import Adapter
from node_agent.adapter_memory.disk_cache import DiskCache, tier_below
from node_agent.adapter_memory.eviction import Candidate, LeastRecentlyUsed
from node_agent.adapter_memory.load_rates import LoadRates
from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.waiters import Waiters
from node_agent.states import FolderState
from node_agent.vllm.folder import ENDED, Folder
from node_agent.vllm.folder_fetch import FetchJob
from node_agent.vllm.own_folder import OwnFolder

THREADS = 4
FAILURE_MEMORY_S = 1.0
"""Seconds for which a failed load stays recorded. Requests in this time fail with it; later ones start a new load."""
MEMORY = Path("/dev/shm")  # noqa: S108 - the folder in it has mode 0700 and a drawn name
"""Memory-backed directory"""


class FolderTier:
    """Adapters in host memory, at most `memory` bytes. One thread calls all methods; none blocks."""

    def __init__(
        self,
        store: ObjectStore,
        memory: int,
        eviction: LeastRecentlyUsed,
        on_change: Callable[[], None],
        cache: DiskCache | None = None,
        modules: Collection[str] = (),
    ) -> None:
        """`modules`: names of the base's modules. `on_change` is called by loader threads when a load has advanced.
        Raises OSError if there is no memory-backed directory."""
        self._store, self.memory, self.eviction, self._on_change = store, memory, eviction, on_change
        self._modules = modules
        self.cache, self.rates, self.pinned = cache, LoadRates(), frozenset[str]()
        self.threads = LoaderThreads("fetch", THREADS)
        self._waiters = Waiters()
        self._spared: dict[str, Container[str]] = {}
        self._folders: OrderedDict[str, Folder] = OrderedDict()
        self._failed: list[tuple[float, Folder]] = []
        self._leaving: list[Folder] = []
        """dropped folders that a thread or vLLM still uses"""
        self._owned = OwnFolder(MEMORY)
        self._root = self._owned.path
        self._number = 0

    @property
    def root(self) -> Path:
        """Folder in memory that holds those of the adapters. It is removed at the end."""
        return self._root

    def get(self, digest: str) -> Folder | None:
        return self._folders.get(digest)

    def all(self) -> Iterable[Folder]:
        return self._folders.values()

    def waiting(self, digest: str) -> int:
        """Returns the number of requests and prefetches that wait for the adapter."""
        return self._waiters.count(digest)

    def lacks_room(self, digest: str) -> bool:
        """Returns whether the adapter's load waits for room in host memory."""
        folder = self._folders.get(digest)
        return folder is not None and folder.state is FolderState.WAITING

    def awaited(self) -> Iterable[str]:
        """Returns the digests that requests or operators' prefetches wait for."""
        return self._waiters.awaited()

    def announce(self, digest: str, priority: Priority, spared: Container[str], tenant: str = "") -> None:
        """Adds a waiter for the adapter. `spared`: digests that a predicted prefetch must not evict. `tenant`: for whom
        it is loaded; empty for no tenant."""
        self._waiters.add(digest, priority, tenant)
        if priority == Priority.PREDICTED:
            self._spared[digest] = spared
        self._set_priority(digest)

    def retract(self, digest: str, priority: Priority) -> None:
        """Removes a waiter. A load that nobody wants any more is abandoned."""
        self._waiters.remove(digest, priority)
        if not self._waiters.has(digest, Priority.PREDICTED):
            self._spared.pop(digest, None)
        self._set_priority(digest)
        folder = self._folders.get(digest)
        if folder is not None and not self.waiting(digest) and folder.state not in ENDED and not folder.holds:
            self.drop(digest)

    def load(self, adapter: Adapter) -> Folder:
        """Returns the adapter. Starts its load unless it is running, complete, or failed a moment ago."""
        folder = self._folders.get(adapter.digest)
        if folder is None or folder.abandoned:
            self._number += 1
            folder = Folder(adapter, self._root / str(self._number))
            folder.priority = self._waiters.first_priority(adapter.digest) or Priority.REQUEST
            folder.tenant = self._waiters.last_tenant(adapter.digest)
            folder.origin = tier_below(self.cache, adapter.digest)
            self._folders[adapter.digest] = folder
            self.threads.add(FetchJob(folder, self._store, self.cache, self.threads, self._on_change, self._modules))
        self._folders.move_to_end(adapter.digest)
        return folder

    def record_call(self, digest: str) -> None:
        """Records a request's use of the adapter."""
        self.eviction.record_call(digest)
        if digest in self._folders:
            self._folders.move_to_end(digest)

    def drop(self, digest: str) -> None:
        """Removes the adapter, if it is there. Its files go once nothing uses them."""
        folder = self._folders.pop(digest, None)
        if folder is None:
            return
        with self.threads.changed:
            if folder.state not in ENDED:
                folder.change_state(FolderState.ABANDONED)
        self._leaving.append(folder)
        self.threads.wake()

    def poll(self) -> None:
        """Frees what is no longer used, and starts the fetches that have room, the most urgent first."""
        self._leaving = [folder for folder in self._leaving if not self._remove(folder)]
        now = time.monotonic()
        for folder in list(self._folders.values()):
            if folder.state is FolderState.FAILED and not any(each is folder for _, each in self._failed):
                self._failed.append((now + FAILURE_MEMORY_S, folder))
        for until, folder in list(self._failed):
            if until <= now:
                self._failed.remove((until, folder))
                if self._folders.get(folder.digest) is folder:
                    self.drop(folder.digest)
        waiting = [folder for folder in self._folders.values() if folder.state is FolderState.WAITING]
        for folder in sorted(waiting, key=lambda each: each.priority):
            if folder.size > self.memory:
                continue  # `SlotStore` refuses it
            if not self._make_room(folder):
                break
            with self.threads.changed:
                folder.change_state(FolderState.FETCHING)
            self.threads.wake()

    @property
    def used(self) -> int:
        """Returns the bytes of all folders, including those that are being filled or removed."""
        folders = [*self._folders.values(), *self._leaving]
        return sum(each.size for each in folders if each.read or each.state is FolderState.FETCHING)

    def close(self) -> None:
        self.threads.close(wait=True)
        if self.cache is not None:
            self.cache.close()
        self._owned.close()

    # --- inside

    def _set_priority(self, digest: str) -> None:
        folder, waits = self._folders.get(digest), self._waiters.first_priority(digest)
        if folder is None or waits is None:
            return
        folder.tenant = self._waiters.last_tenant(digest)
        if waits != folder.priority:
            folder.priority = waits
            self.threads.wake()

    def _make_room(self, folder: Folder) -> bool:
        """Evicts idle adapters so that the folder fits. Evicts none, and returns False, if that would not suffice."""
        spared = self._spared.get(folder.digest, ()) if folder.priority == Priority.PREDICTED else ()
        pinned = self.pinned
        idle = [
            each
            for each in self._folders.values()
            if each.complete and not each.in_use and not self.waiting(each.digest)
            if each.digest not in spared and each.digest not in pinned
        ]
        if self.used - sum(each.size for each in idle) + folder.size > self.memory:
            return False
        for digest in self.eviction.order([self._candidate(each) for each in idle], time.monotonic()):
            if self.used + folder.size <= self.memory:
                break
            self.eviction.record_eviction(digest)
            self.drop(digest)
            self._leaving = [each for each in self._leaving if not self._remove(each)]
        return self.used + folder.size <= self.memory

    def _candidate(self, folder: Folder) -> Candidate:
        reload_s = self.rates.seconds(tier_below(self.cache, folder.digest), folder.size)
        return Candidate(folder.digest, folder.size, reload_s, folder.arrived)

    def _remove(self, folder: Folder) -> bool:
        """Removes the files of a dropped folder. Returns False while they are in use."""
        if folder.holds or folder.busy or folder.state not in ENDED:
            return False
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.size = folder.read = 0
        if folder.writer is not None:
            folder.writer.end()
        return True
