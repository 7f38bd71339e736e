"""Brings an adapter's two files into its folder, from the disk cache or the object store, and checks their hashes.

What comes from the store is written to the disk cache on the way. A file of the cache that is damaged is dropped, and
the adapter is then read from the store.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Collection

from adapters.blobs import blob_key
from adapters.errors import AdapterError, CorruptArtifact, NotFound
from adapters.peft_folder import make_loadable
from adapters.store import ObjectStore
from node_agent.adapter_memory.disk_cache import DiskCache
from node_agent.adapter_memory.loader_threads import LoaderThreads
from node_agent.leases import LoadFailed
from node_agent.states import FolderState
from node_agent.vllm.cached_files import CachedAdapter, FilesWriter, find
from node_agent.vllm.folder import CONFIG, ENDED, WEIGHTS, Folder

CHUNK_BYTES = 4 << 20
"""Maximum bytes of one read. A more urgent load continues after it."""
MAX_CONFIG_BYTES = 1 << 20


class FetchJob:
    """Fetches the files of one folder, in pieces (node_agent.adapter_memory.loader_threads.Job)."""

    def __init__(
        self,
        folder: Folder,
        store: ObjectStore,
        cache: DiskCache | None,
        threads: LoaderThreads,
        on_change: Callable[[], None],
        modules: Collection[str],
    ) -> None:
        """`modules`: names of the base's modules."""
        self._modules = modules
        self.load, self._store, self._threads, self._on_change = folder, store, threads, on_change
        self._cache = cache
        self._cached: CachedAdapter | None = None
        self._sizes = (0, 0)
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
            if state is FolderState.COMPLETE:
                make_loadable(self.load.path, self.load.adapter.ranks, self._modules)
        except (CorruptArtifact, NotFound) as error:
            failure = LoadFailed(str(error), damaged=True)
        except (AdapterError, OSError) as error:
            failure = LoadFailed(str(error))
        if failure is not None and self.load.writer is not None:
            self.load.writer.end()
        with self._threads.changed:
            self.load.busy = False
            if self.load.state not in ENDED:  # otherwise it was abandoned meanwhile
                if failure is not None:
                    self.load.failure = failure
                    self.load.change_state(FolderState.FAILED)
                elif state is not None:
                    if state is FolderState.COMPLETE:
                        self.load.arrived = time.monotonic()
                    self.load.change_state(state)
        self._threads.wake()
        self._on_change()

    def _read_sizes(self) -> FolderState | None:
        folder, adapter = self.load, self.load.adapter
        if not (adapter.config and adapter.weights):
            raise NotFound("the registry does not name the adapter's original files; deploy it again")
        self._cached = find(self._cache, adapter) if self._cache is not None else None
        folder.origin = "absent" if self._cached is None else "disk"
        self._sizes = self._stored_sizes() if self._cached is None else self._cached.sizes
        if self._sizes[0] > MAX_CONFIG_BYTES:
            raise CorruptArtifact(f"{CONFIG} has {self._sizes[0]} bytes; at most {MAX_CONFIG_BYTES} are allowed")
        folder.size = sum(self._sizes)
        return None

    def _stored_sizes(self) -> tuple[int, int]:
        sizes = []
        for sha256 in (self.load.adapter.config, self.load.adapter.weights):
            info = self._store.head(blob_key(sha256))
            if info is None:
                raise NotFound(f"the adapter's file {sha256[:12]} is missing from the registry")
            sizes.append(info.size)
        return sizes[0], sizes[1]

    def _read_next(self) -> FolderState | None:
        try:
            return self._read_piece(self._cached)
        except CorruptArtifact as error:
            if self._cached is None:
                raise
            self._cached.file.drop(str(error))
        self._cached, self.load.origin, self.load.read, self._sha256 = None, "absent", 0, hashlib.sha256()
        shutil.rmtree(self.load.path)
        return None  # the next piece is read from the store

    def _read_piece(self, cached: CachedAdapter | None) -> FolderState | None:
        """Reads the next piece of the files, the config before the first one. Raises CorruptArtifact if the whole
        differs from what the registry names."""
        folder, adapter = self.load, self.load.adapter
        if not folder.read:
            self._read_config(cached)
        offset = folder.read - self._sizes[0]
        length = min(CHUNK_BYTES, self._sizes[1] - offset)
        if cached is None:
            piece = self._store.get_range(blob_key(adapter.weights), offset, length)
        else:
            piece = cached.weights(offset, length)
        with (folder.path / WEIGHTS).open("ab") as file:
            file.write(piece)
        self._sha256.update(piece)
        folder.read += len(piece)
        is_last = len(piece) < length or folder.read == folder.size
        if is_last and self._sha256.hexdigest() != adapter.weights:
            raise CorruptArtifact(f"{WEIGHTS} does not have the SHA-256 that the registry names")
        if folder.writer is not None:
            folder.writer.write_weights(offset, piece)  # the last one completes the file
        return FolderState.COMPLETE if is_last else None

    def _read_config(self, cached: CachedAdapter | None) -> None:
        folder, adapter = self.load, self.load.adapter
        folder.path.mkdir(mode=0o700)
        config = self._store.get(blob_key(adapter.config)).data if cached is None else cached.config()
        if hashlib.sha256(config).hexdigest() != adapter.config:
            raise CorruptArtifact(f"{CONFIG} does not have the SHA-256 that the registry names")
        (folder.path / CONFIG).write_bytes(config)
        folder.read = len(config)
        if cached is None and self._cache is not None:
            folder.writer = FilesWriter(self._cache, adapter, self._sizes, -(-self._sizes[1] // CHUNK_BYTES))
            folder.writer.write_config(config)
