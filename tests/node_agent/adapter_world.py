"""Deployed adapters, stores over them, and ways to wait for a load: for the tests of adapter memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from adapters.base_model import PROJECTIONS, BaseModel, load_base_model
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.store import ObjectStore
from benchmarks.peft_reference import draw_adapter, make_adapter
from cluster.messages import Adapter
from kernels.reference import lora_rows
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import EngineConfig
from node_agent.types import Lease, Pending

MODULES = {name: f"{'self_attn' if name in 'qkvo' else 'mlp'}.{name}_proj" for name in PROJECTIONS}


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
        for i in range(6):
            path = make_adapter(stories_dir, root / f"a{i}", i, **draw_adapter(rng, 5))
            config = (path / "adapter_config.json").read_bytes()
            registry.deploy("t", f"a{i}", config, path / "adapter_model.safetensors")
            found = registry.resolve("t", f"a{i}")
            self.adapters.append(Adapter(found.digest, found.artifact_key, found.bytes, tuple(found.ranks)))
            self.files[found.digest] = path / "adapter_model.safetensors"

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
    tensors = load_file(world.files[held.digest])
    table = store.table
    seen = 0
    for layer in range(world.base.num_layers):
        for p, name in enumerate(PROJECTIONS):
            key = f"base_model.model.model.layers.{layer}.{MODULES[name]}.lora_{{}}.weight"
            rank = int(table.rank[held.slot, layer, p])
            if key.format("A") not in tensors:
                assert rank == 0
                continue
            a, b = tensors[key.format("A")], tensors[key.format("B")]
            assert rank == a.shape[0]
            first_a, first_b = table.first[held.slot, layer, p].tolist()
            got_a = lora_rows(store.pool.data, table.row_offset[first_a : first_a + rank], a.shape[1])
            got_b = lora_rows(store.pool.data, table.row_offset[first_b : first_b + rank], b.shape[0])
            assert torch.equal(got_a, a)
            assert torch.equal(got_b, b.T)
            seen += 2
    assert seen == len(tensors)


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
