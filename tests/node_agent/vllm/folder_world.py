"""Stored adapters, and folders and slots over them, without vLLM: for tests of the node's adapter memory for vLLM."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path

from adapters.blobs import blob_key
from adapters.open_store import open_store
from adapters.store import ObjectStore
from cluster.messages import Adapter
from node_agent.adapter_memory.demand import Demand
from node_agent.adapter_memory.disk_cache import open_cache
from node_agent.adapter_memory.eviction import POLICIES
from node_agent.config import DiskCacheConfig
from node_agent.vllm import cached_files
from node_agent.vllm.folder import CONFIG, WEIGHTS, Folder
from node_agent.vllm.folders import FolderTier
from node_agent.vllm.slots import AdapterOrders, Slot, SlotLimits, SlotStore

BYTES = 3000
"""Usual size of an adapter's weights."""
BASE = "b" * 64
SECONDS = 30.0
SLOT_BYTES = 1000
MAX_RANK = 16


def put_adapter(store: ObjectStore, seed: int, size: int = BYTES, rank: int = 8) -> Adapter:
    """Stores an adapter's original files, of random bytes."""
    config = json.dumps({"r": rank, "lora_alpha": 8, "target_modules": ["q_proj"], "seed": seed}).encode()
    weights = random.Random(seed).randbytes(size)
    names = [hashlib.sha256(data).hexdigest() for data in (config, weights)]
    for name, data in zip(names, (config, weights), strict=True):
        store.put(blob_key(name), data)
    digest = hashlib.sha256(config + weights).hexdigest()
    return Adapter(digest, "", size, (rank,), config=names[0], weights=names[1])


class HeldStore:
    """Object store whose reads of weights wait until `let` is set."""

    def __init__(self, store: ObjectStore) -> None:
        self._store, self.let, self.reading = store, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reading.set()
        assert self.let.wait(SECONDS)
        return self._store.get_range(key, start, length)


class FolderWorld:
    """Folders over a real object store in a directory."""

    def __init__(self, root: Path, memory: int = 1 << 20, held: bool = False, disk: int = 0) -> None:
        """`disk`: bytes of the disk cache; 0: none."""
        self.objects = open_store(str(root / "registry"))
        self.held = HeldStore(self.objects)
        self._changed = threading.Event()
        self.demand = Demand()
        store: ObjectStore = self.held if held else self.objects  # type: ignore[assignment]
        self.cache = open_cache(DiskCacheConfig(str(root / "cache"), disk), BASE, cached_files.is_intact)
        self.tier = FolderTier(store, memory, POLICIES["lru"](self.demand), self._changed.set, self.cache)

    def until(self, condition: Callable[[], object], poll: Callable[[], None] | None = None) -> None:
        """Polls until the condition holds. Raises TimeoutError."""
        deadline = time.monotonic() + SECONDS
        poll = poll or self.tier.poll
        poll()
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError
            self._changed.wait(0.02)
            self._changed.clear()
            poll()

    def loaded(self, adapter: Adapter) -> Folder:
        """Returns the adapter's folder, complete."""
        folder = self.tier.load(adapter)
        self.until(lambda: folder.complete or folder.failed)
        assert folder.complete, folder.failure
        return folder

    def read(self, folder: Folder) -> tuple[bytes, bytes]:
        return (folder.path / CONFIG).read_bytes(), (folder.path / WEIGHTS).read_bytes()

    @property
    def root(self) -> Path:
        return self.tier._root

    def files(self) -> set[str]:
        """Returns the names of the folders in memory."""
        return {path.name for path in self.root.iterdir()}


class PlayedVllm:
    """What vLLM does with the orders: it loads and removes adapters in turn, and never holds more than it has slots."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.held: dict[int, Slot] = {}
        self.loading: list[Slot] = []

    def add(self, slot: Slot) -> None:
        assert len(self.held) + len(self.loading) < self.count, "more adapters than slots"
        assert slot.folder.complete and slot.folder.path.is_dir()
        self.loading.append(slot)

    def remove(self, slot: Slot) -> None:
        assert not slot.leases, "an adapter in use was removed"
        del self.held[slot.number]

    def end_load(self, store: SlotStore, failure: str = "") -> Slot:
        """Ends the first load."""
        slot = self.loading.pop(0)
        assert slot.folder.path.is_dir(), "the folder went while vLLM read it"
        if not failure:
            self.held[slot.number] = slot
        store.record_load(slot.number, failure)
        return slot


class SlotWorld(FolderWorld):
    """Slots of a played vLLM over real folders."""

    def __init__(self, root: Path, count: int = 2, memory: int = 1 << 20, held: bool = False, disk: int = 0) -> None:
        super().__init__(root, memory, held, disk)
        self.vllm = PlayedVllm(count)
        orders = AdapterOrders(self.vllm.add, self.vllm.remove)
        limits = SlotLimits(count, MAX_RANK, SLOT_BYTES)
        self.store = SlotStore(self.tier, limits, orders, self.demand, POLICIES["lru"](self.demand))

    def fetched(self, adapter: Adapter) -> None:
        """Waits for the adapter's files."""
        folder = self.tier.load(adapter)
        self.until(lambda: folder.complete, self.store.poll)

    def acquire(self, adapter: Adapter, spared: Container[str] = ()) -> object:
        """Returns what `acquire` says once the adapter is in host memory."""
        self.fetched(adapter)
        return self.store.acquire(adapter, spared=spared)
