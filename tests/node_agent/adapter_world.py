"""Deployed adapters, stores over them, and ways to wait for a load: for the tests of adapter memory."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from adapters import artifact
from adapters.artifact import MAGIC, PREFIX, read_header
from adapters.base_model import PROJECTIONS, BaseModel, load_base_model
from adapters.deployment import AdapterUpload
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.store import Arrived, ObjectStore
from cluster.messages import Adapter
from kernels.reference import lora_rows
from node_agent.adapter_memory.store import AdapterStore
from node_agent.adapter_memory.table import AdapterTable
from node_agent.config import EngineConfig
from node_agent.leases import Lease, Pending
from tests.support.peft_reference import draw_adapter, make_adapter

MODULES = {name: f"{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj" for name in PROJECTIONS}

LAYERS = 5
"""of stories260K"""


def host_slot(store: AdapterStore, lease: Lease) -> int:
    """The adapter's slot in the host table. Raises RuntimeError when it is not in host memory."""
    slot = store.device[lease.digest].host.slot
    if slot < 0:
        raise RuntimeError(f"adapter {lease.digest} is not in host memory")
    return slot


class World:
    """Six deployed adapters and a way to make stores over them."""

    def __init__(self, stories_dir: Path, root: Path) -> None:
        self.model_dir = stories_dir
        self.base: BaseModel = load_base_model(stories_dir)
        self.objects: ObjectStore = open_store(str(root / "registry"))
        registry = Registry(self.objects, self.base)
        rng = random.Random(5)
        self.adapters: list[Adapter] = []
        self.files: dict[str, Path] = {}
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        for i in range(6):
            path = make_adapter(stories_dir, root / f"a{i}", i, **draw_adapter(rng, 5))
            config = (path / "adapter_config.json").read_bytes()
            registry.deploy("t", f"a{i}", AdapterUpload(config, path / "adapter_model.safetensors"))
            found = registry.resolve("t", f"a{i}")
            self.adapters.append(Adapter(found.digest, found.artifact_key, found.bytes, tuple(found.ranks)))
            self.files[found.digest] = path / "adapter_model.safetensors"

    def tensors(self, digest: str) -> dict[str, torch.Tensor]:
        """What the PEFT file holds."""
        if digest not in self._tensors:
            self._tensors[digest] = load_file(self.files[digest])
        return self._tensors[digest]

    def store(self, objects: ObjectStore | None = None, **settings: object) -> AdapterStore:
        config = EngineConfig(
            model_dir=str(self.model_dir),
            base_id="stories",
            registry="",
            **{"adapter_memory": 600 << 10, "host_memory": 4 << 20, "adapter_slots": 3, **settings},  # type: ignore[arg-type]
        )
        device = torch.device("cpu")
        return AdapterStore(config, objects or self.objects, self.base, device, torch.float32, lambda: None)


def until(store: AdapterStore, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        store.poll()
        assert time.monotonic() < deadline, "the load never ended"
        time.sleep(0.0005)
    store.poll()


def lease(store: AdapterStore, adapter: Adapter) -> Lease:
    """Acquire, waiting for the measure; the lease need not be loaded yet."""
    found = measured(store, adapter)
    assert isinstance(found, Lease), found
    return found


def loaded_lease(store: AdapterStore, adapter: Adapter) -> Lease:
    found = lease(store, adapter)
    until(store, lambda: store.loaded(found))
    return found


def assert_contents(store: AdapterStore, world: World, held: Lease) -> None:
    """Every row that the table names is the row of the PEFT file."""
    layers = range(world.base.num_layers)
    seen = sum(assert_layer(world, held.digest, store.table, store.pool.data, held.slot, layer) for layer in layers)
    assert seen == len(world.tensors(held.digest))


def assert_layer(world: World, digest: str, table: AdapterTable, data: torch.Tensor, slot: int, layer: int) -> int:
    """One layer's rows are those of the PEFT file; returns how many tensors it has."""
    tensors = world.tensors(digest)
    seen = 0
    for p, name in enumerate(PROJECTIONS):
        key = f"base_model.model.model.layers.{layer}.{MODULES[name]}.lora_{{}}.weight"
        rank = int(table.rank[slot, layer, p])
        if key.format("A") not in tensors:
            assert rank == 0
            continue
        a, b = tensors[key.format("A")], tensors[key.format("B")]
        assert rank == a.shape[0]
        first_a, first_b = table.first[slot, layer, p].tolist()
        assert torch.equal(lora_rows(data, table.row_offset[first_a : first_a + rank], a.shape[1]), a)
        assert torch.equal(lora_rows(data, table.row_offset[first_b : first_b + rank], b.shape[0]), b.T)
        seen += 2
    return seen


class LateEvent:
    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        raise AssertionError("the store must never wait for a reader")


def measured(store: AdapterStore, adapter: Adapter) -> object:
    """What acquire answers when it knows, as a request in the queue sees it."""
    store.announce(adapter)
    found = store.acquire(adapter)
    deadline = time.monotonic() + 30
    while isinstance(found, Pending):
        store.poll()
        found = store.acquire(adapter)
        assert time.monotonic() < deadline
    store.retract(adapter.digest)
    return found


def header_only(data: bytes) -> bytes:
    """Of an artifact's beginning, without the layers that come with it: they are then read by themselves."""
    return data[: PREFIX + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 8], "little")]


def comes_with_header(start: int) -> bool:
    """Whether a read from this byte is the one that is begun with the header's."""
    return start == artifact.FIRST_READ


class Turnstile:
    """The real store; each ranged read of weights waits until the test lets it through, and may be spoilt."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self._changed = threading.Condition()
        self.waiting: Counter[int] = Counter()
        """Reads that wait, by the byte they start from."""
        self._passes: set[int] = set()
        self.reads: list[int] = []
        self.open = False
        self.spoil: Callable[[int, memoryview], int | None] = lambda start, buffer: None
        """Called after the real read; returns another count of bytes, may change them, or raises."""
        self.spoil_first: Callable[[bytes], bytes] = header_only
        """Of what is read with the header: nothing but it, or no layer of a small adapter would come to the stile."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        found = self._inner.get_range(key, start, length)
        return found if start else self.spoil_first(found)

    def get_range_into(self, key: str, start: int, buffer: memoryview, arrived: Arrived | None = None) -> int:
        if comes_with_header(start):
            return self._inner.get_range_into(key, start, buffer, arrived)
        with self._changed:
            self.reads.append(start)
            self.waiting[start] += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.open or start in self._passes, 60)
            self._passes.discard(start)
            self.waiting -= Counter([start])
        found = self._inner.get_range_into(key, start, buffer)  # what comes late may be spoilt first
        other = self.spoil(start, buffer)
        return found if other is None else other

    def await_waiting(self, count: int) -> list[int]:
        """The starts of `count` reads, once so many wait."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.waiting) >= count, 60)
            return sorted(self.waiting)

    def let(self, start: int) -> None:
        with self._changed:
            self._passes.add(start)
            self._changed.notify_all()

    def open_all(self) -> None:
        with self._changed:
            self.open = True
            self._changed.notify_all()


def starts(world: World, adapter: Adapter) -> list[int]:
    return [block.offset for block in read_header(world.objects, adapter.artifact).layers]


def states(store: AdapterStore, held: Lease) -> list[int]:
    return [store.state(held, layer) for layer in range(LAYERS)]
