"""Adapter memory: leases, eviction, contents, failures, and that everything returns to free."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from safetensors.torch import load_file

from adapters.base_model import PROJECTIONS, BaseModel, load_base_model
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.store import ObjectStore
from benchmarks.peft_reference import draw_adapter, make_adapter
from cluster.messages import Adapter
from kernels.reference import lora_rows
from node_agent.adapter_memory.layout import ROW_ALIGN
from node_agent.adapter_memory.runs import FreeRuns
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import EngineConfig, LinkConfig
from node_agent.types import LayerState, Lease, LoadFailed, NoRoom, Pending, TooLarge

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


@pytest.fixture(scope="module")
def world(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(stories_dir, tmp_path_factory.mktemp("world"))


@pytest.fixture
def make_store(world: World) -> Iterator[Callable[..., AdapterStore]]:
    made: list[AdapterStore] = []

    def make(**settings: object) -> AdapterStore:
        made.append(world.store(**settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for store in made:
        store.close()


def until(store: AdapterStore, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        store.poll()
        assert time.monotonic() < deadline, "the load never ended"
        time.sleep(0.0005)
    store.poll()


def lease(store: AdapterStore, adapter: Adapter) -> Lease:
    """Acquire, waiting for the measure; the lease need not be loaded yet."""
    found = _measured(store, adapter)
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


class StoreMachine(RuleBasedStateMachine):
    """Drawn acquires, late releases and polls over a pool for about two adapters."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.store = self.world.store()
        self.held: list[Lease] = []
        self.late: list[LateEvent] = []

    def teardown(self) -> None:
        for event in self.late:
            event.ended = True
        for held in self.held:
            self.store.release(held, [])
        deadline = time.monotonic() + 30
        while self.store.leases or any(not e.copy.ended.is_set() for e in self.store._device.values()):
            self.store.poll()
            assert time.monotonic() < deadline
        for digest in list(self.store._device):
            self.store._evict(digest)
        assert self.store.pool.free_bytes == self.store.pool.size
        self.store.close()

    @rule(i=st.integers(0, 5))
    def acquire(self, i: int) -> None:
        found = self.store.acquire(self.world.adapters[i])
        if isinstance(found, Lease):
            self.held.append(found)
        else:
            assert isinstance(found, (NoRoom, Pending, TooLarge))

    @rule(i=st.integers(0, 5))
    def load_wholly(self, i: int) -> None:
        found = _measured(self.store, self.world.adapters[i])
        if isinstance(found, Lease):
            self.held.append(found)
            until(self.store, lambda: self.store.loaded(found))
            assert all(self.store.state(found, layer) == LayerState.DEVICE for layer in range(5))

    # Whether an acquire succeeds depends on the workers' timing, so rules draw the same whatever has happened.
    @rule(which=st.integers(0, 7), late=st.booleans())
    def release(self, which: int, late: bool) -> None:
        if not self.held:
            return
        held = self.held.pop(which % len(self.held))
        events = []
        if late:
            events = [LateEvent()]
            self.late += events
        self.store.release(held, events)

    @rule()
    def end_late_reader(self) -> None:
        if self.late:
            self.late.pop(0).ended = True
            self.store.poll()

    @invariant()
    def leased_contents_are_whole(self) -> None:
        self.store.poll()
        for held in self.held:
            if self.store.loaded(held):
                assert_contents(self.store, self.world, held)

    @invariant()
    def nothing_has_two_owners(self) -> None:
        runs = sorted((e.start, e.start + -(-e.size // ROW_ALIGN)) for e in self.store._device.values())
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(runs))
        slots = [e.slot for e in self.store._device.values()]
        assert len(slots) == len(set(slots))
        assert self.store.hosts.used <= self.store.hosts.memory


class LateEvent:
    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        raise AssertionError("the store must never wait for a reader")


def test_store_state_machine(world: World) -> None:
    StoreMachine.world = world
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_late_reader_keeps_its_adapter(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """A released lease whose pass still reads is neither evicted nor overwritten."""
    store = make_store(adapter_slots=1)
    held = loaded_lease(store, world.adapters[0])
    reader = LateEvent()
    store.release(held, [reader])
    assert isinstance(_measured(store, world.adapters[1]), NoRoom)
    assert_contents(store, world, held)
    reader.ended = True
    store.poll()
    other = loaded_lease(store, world.adapters[1])
    assert_contents(store, world, other)
    store.release(other, [])


def _measured(store: AdapterStore, adapter: Adapter) -> object:
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


def test_too_large_names_both_sizes(world: World, make_store: Callable[..., AdapterStore]) -> None:
    found = _measured(make_store(adapter_memory=4096), world.adapters[0])
    assert isinstance(found, TooLarge)
    assert found.have == 4096 < found.need


def test_one_load_however_many_wait(world: World, make_store: Callable[..., AdapterStore]) -> None:
    store = make_store(load_link=LinkConfig(bandwidth=3e6))
    leases = [lease(store, world.adapters[2]) for _ in range(5)]
    assert len({held.slot for held in leases}) == 1
    assert not store.loaded(leases[0])
    until(store, lambda: store.loaded(leases[0]))
    assert_contents(store, world, leases[0])
    for held in leases:
        store.release(held, [])
    with pytest.raises(RuntimeError, match="twice"):
        store.release(leases[0], [])


class FaultyStore:
    """The real store with one fault in its ranged reads."""

    def __init__(self, inner: ObjectStore, fault: Callable[[bytes], bytes]) -> None:
        self._inner, self._fault, self.armed = inner, fault, True

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._inner.get_range(key, start, length)
        return self._fault(data) if self.armed and start > 4096 else data

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def _flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _lost(_: bytes) -> bytes:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("fault", [_flip, _lost, lambda data: data[: len(data) // 2]], ids=["bit", "lost", "short"])
def test_a_broken_read_fails_the_load_and_the_next_try_works(world: World, fault: Callable[[bytes], bytes]) -> None:
    objects = FaultyStore(world.objects, fault)
    store = world.store(objects)  # type: ignore[arg-type]
    adapter = max(world.adapters, key=lambda a: a.bytes)
    try:
        found = _measured(store, adapter)
        if isinstance(found, Lease):
            until(store, lambda: bool(store.failure(found)))
            assert store.state(found, 0) == LayerState.FAILED
            assert not store.loaded(found)
            store.release(found, [])
        else:
            assert isinstance(found, LoadFailed)
        objects.armed = False
        store.hosts.failure_memory = 0.0
        store.poll()
        again = loaded_lease(store, adapter)
        assert_contents(store, world, again)
        store.release(again, [])
    finally:
        store.close()


def test_missing_artifact_is_a_load_failure(world: World, make_store: Callable[..., AdapterStore]) -> None:
    found = _measured(make_store(), Adapter("0" * 64, "artifacts/v1/none/none", 1, (8,)))
    assert isinstance(found, LoadFailed)


def test_another_adapters_artifact_is_refused(world: World, make_store: Callable[..., AdapterStore]) -> None:
    """Two digests never mix, whatever a message says."""
    first, second = world.adapters[:2]
    found = _measured(make_store(), Adapter(first.digest, second.artifact, second.bytes, second.ranks))
    assert isinstance(found, LoadFailed)


class RunsMachine(RuleBasedStateMachine):
    """FreeRuns against a plain set of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.free, self.taken = FreeRuns(50), set(range(50)), []

    @rule(length=st.integers(1, 20))
    def take(self, length: int) -> None:
        possible = any(set(range(i, i + length)) <= self.free for i in range(51 - length))
        start = self.runs.take(length)
        assert (start is not None) == possible
        if start is not None:
            assert set(range(start, start + length)) <= self.free
            self.free -= set(range(start, start + length))
            self.taken.append((start, length))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start, length = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.runs.give(start, length)
        self.free |= set(range(start, start + length))
        with pytest.raises(RuntimeError, match="twice"):
            self.runs.give(start, length)

    @invariant()
    def counts(self) -> None:
        assert self.runs.free == len(self.free)


def test_free_runs() -> None:
    run_state_machine_as_test(RunsMachine, settings=settings(max_examples=60, deadline=None))
