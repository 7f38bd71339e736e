"""Host tier of a node with vLLM: adapters as PEFT folders in memory-backed files.

The two original files of an adapter are fetched by their hashes, checked, and laid out as they were deployed. vLLM
reads an adapter from its folder when it is loaded into a slot.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from adapters.blobs import blob_key
from adapters.errors import AdapterError, CorruptArtifact, NotFound
from adapters.store import ObjectStore
from cluster.messages import Adapter
from node_agent.adapter_memory.eviction import Candidate, LeastRecentlyUsed
from node_agent.adapter_memory.load_rates import LoadRates
from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.adapter_memory.priority import Priority
from node_agent.adapter_memory.waiters import Waiters
from node_agent.leases import LoadFailed

THREADS = 4
CHUNK_BYTES = 4 << 20
"""Maximum bytes of one read. A more urgent load continues after it."""
MAX_CONFIG_BYTES = 1 << 20
FAILURE_MEMORY_S = 1.0
"""Seconds for which a failed load stays recorded. Requests in this time fail with it; later ones start a new load."""
PREFIX = "garnish-vllm-"
"""Beginning of the names of folders in the memory-backed directory."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class FolderState(Enum):
    """States of a folder, in their usual order."""

    MEASURING = auto()
    """the sizes of its files are being read"""
    WAITING = auto()
    """there is no room yet"""
    FETCHING = auto()
    COMPLETE = auto()
    FAILED = auto()
    ABANDONED = auto()
    """nobody wanted the adapter any more"""


ENDED = (FolderState.COMPLETE, FolderState.FAILED, FolderState.ABANDONED)


@dataclass(eq=False)
class Folder:
    """Adapter whose files are in the host tier, or on their way there. The engine's thread writes `priority`,
    `leased`, `holds` and the states WAITING, FETCHING and ABANDONED; loader threads write the rest."""

    adapter: Adapter
    path: Path
    state: FolderState = FolderState.MEASURING
    priority: Priority = Priority.REQUEST
    leased: bool = False
    tenant: str = ""
    """tenant for whom it is loaded; empty for no tenant"""
    holds: int = 0
    """number of loads into a slot that read the folder"""
    busy: bool = False
    """whether a loader thread reads or writes its files"""
    failure: LoadFailed | None = None
    size: int = 0
    """bytes of both files; 0 until they are known"""
    read: int = 0
    began: float = field(default_factory=time.monotonic)
    arrived: float = 0.0

    @property
    def digest(self) -> str:
        return self.adapter.digest

    @property
    def complete(self) -> bool:
        return self.state is FolderState.COMPLETE

    @property
    def abandoned(self) -> bool:
        return self.state is FolderState.ABANDONED

    @property
    def failed(self) -> bool:
        return self.state is FolderState.FAILED or self.abandoned

    @property
    def fetched(self) -> float:
        return self.read / self.size if self.size else 0.0

    @property
    def in_use(self) -> bool:
        return self.holds > 0 or self.state not in ENDED


class FolderTier:
    """Adapters in host memory, at most `memory` bytes. One thread calls all methods; none blocks."""

    def __init__(
        self, store: ObjectStore, memory: int, eviction: LeastRecentlyUsed, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called by loader threads when a load has advanced. Raises OSError if there is no
        memory-backed directory."""
        self._store, self.memory, self.eviction, self._on_change = store, memory, eviction, on_change
        self.rates, self.pinned = LoadRates(), frozenset[str]()
        self.threads = LoaderThreads("fetch", THREADS)
        self._waiters = Waiters()
        self._spared: dict[str, Container[str]] = {}
        self._folders: OrderedDict[str, Folder] = OrderedDict()
        self._failed: list[tuple[float, Folder]] = []
        self._leaving: list[Folder] = []
        """dropped folders that a thread or vLLM still uses"""
        self._root, self._owner = _claim_root()
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
            self._folders[adapter.digest] = folder
            self.threads.add(FetchJob(folder, self._store, self.threads, self._on_change))
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
                folder.state = FolderState.ABANDONED
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
                folder.state = FolderState.FETCHING
            self.threads.wake()

    @property
    def used(self) -> int:
        """Returns the bytes of all folders, including those that are being filled or removed."""
        folders = [*self._folders.values(), *self._leaving]
        return sum(each.size for each in folders if each.read or each.state is FolderState.FETCHING)

    def close(self) -> None:
        self.threads.close(wait=True)
        shutil.rmtree(self._root, ignore_errors=True)
        os.close(self._owner)

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
        return Candidate(folder.digest, folder.size, self.rates.seconds("absent", folder.size), folder.arrived)

    def _remove(self, folder: Folder) -> bool:
        """Removes the files of a dropped folder. Returns False while they are in use."""
        if folder.holds or folder.busy or folder.state not in ENDED:
            return False
        shutil.rmtree(folder.path, ignore_errors=True)
        folder.size = folder.read = 0
        return True


class FetchJob:
    """Fetches the files of one folder, in pieces (node_agent.adapter_memory.loader_threads.Job)."""

    def __init__(
        self, folder: Folder, store: ObjectStore, threads: LoaderThreads, on_change: Callable[[], None]
    ) -> None:
        self.load, self._store, self._threads, self._on_change = folder, store, threads, on_change
        self._weights_bytes = 0
        self._sha256 = hashlib.sha256()

    @property
    def over(self) -> bool:
        return not self.load.busy and self.load.state in ENDED

    def take(self, now: float, is_blocked: bool) -> Callable[[], None] | None:  # noqa: ARG002 - as Job.take
        if self.load.busy or is_blocked or self.load.state not in (FolderState.MEASURING, FolderState.FETCHING):
            return None
        self.load.busy = True
        return self._measure if self.load.state is FolderState.MEASURING else self._fetch

    def wake_at(self) -> float | None:
        return None

    def _measure(self) -> None:
        self._do(self._read_sizes, FolderState.WAITING)

    def _fetch(self) -> None:
        self._do(self._read_next, None)

    def _do(self, work: Callable[[], FolderState | None], state: FolderState | None) -> None:
        failure: LoadFailed | None = None
        try:
            state = work() or state
        except (CorruptArtifact, NotFound) as error:
            failure = LoadFailed(str(error), damaged=True)
        except (AdapterError, OSError) as error:
            failure = LoadFailed(str(error))
        with self._threads.changed:
            self.load.busy = False
            if self.load.state not in ENDED:  # otherwise it was abandoned meanwhile
                if failure is not None:
                    self.load.failure, self.load.state = failure, FolderState.FAILED
                elif state is not None:
                    if state is FolderState.COMPLETE:
                        self.load.arrived = time.monotonic()
                    self.load.state = state
        self._threads.wake()
        self._on_change()

    def _read_sizes(self) -> FolderState | None:
        adapter = self.load.adapter
        if not (adapter.config and adapter.weights):
            raise NotFound("the registry does not name the adapter's original files; deploy it again")
        sizes = []
        for sha256 in (adapter.config, adapter.weights):
            info = self._store.head(blob_key(sha256))
            if info is None:
                raise NotFound(f"the adapter's file {sha256[:12]} is missing from the registry")
            sizes.append(info.size)
        if sizes[0] > MAX_CONFIG_BYTES:
            raise CorruptArtifact(f"{CONFIG} has {sizes[0]} bytes; at most {MAX_CONFIG_BYTES} are allowed")
        self._weights_bytes = sizes[1]
        self.load.size = sum(sizes)
        return None

    def _read_next(self) -> FolderState | None:
        folder = self.load
        if not folder.read:
            folder.path.mkdir(mode=0o700)
            config = self._store.get(blob_key(folder.adapter.config)).data
            if hashlib.sha256(config).hexdigest() != folder.adapter.config:
                raise CorruptArtifact(f"{CONFIG} does not have the SHA-256 that the registry names")
            (folder.path / CONFIG).write_bytes(config)
            folder.read = len(config)
        offset = folder.read - (folder.size - self._weights_bytes)
        length = min(CHUNK_BYTES, self._weights_bytes - offset)
        chunk = self._store.get_range(blob_key(folder.adapter.weights), offset, length)
        with (folder.path / WEIGHTS).open("ab") as file:
            file.write(chunk)
        self._sha256.update(chunk)
        folder.read += len(chunk)
        if len(chunk) == length and folder.read < folder.size:
            return None
        if self._sha256.hexdigest() != folder.adapter.weights:
            raise CorruptArtifact(f"{WEIGHTS} does not have the SHA-256 that the registry names")
        return FolderState.COMPLETE


def _claim_root() -> tuple[Path, int]:
    """Makes a folder in the memory-backed directory, and removes those of processes that have ended. Returns its path
    and the descriptor whose lock marks it as used."""
    shared = Path("/dev/shm")  # noqa: S108 - the folder has mode 0700 and a drawn name
    for folder in shared.glob(f"{PREFIX}*"):
        with suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
    while True:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=shared))
        owner = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(owner, fcntl.LOCK_EX)
        if root.exists():  # otherwise another node that starts removed it before it was locked
            return root, owner
        os.close(owner)
