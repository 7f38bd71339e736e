"""The disk cache below vLLM's folders: what it keeps, and that nothing it has wrong reaches vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import Adapter
from cluster.news import Resident
from cluster.residency import AdapterState
from node_agent.adapter_memory.priority import Priority
from node_agent.leases import Lease
from node_agent.vllm import folder_fetch
from tests.node_agent.vllm.folder_world import SlotWorld, put_adapter

DISK = 1 << 16
CHUNK = 700
"""Bytes of a read: an adapter has some five."""

OpenWorld = Callable[..., SlotWorld]


class CountedStore:
    """Object store that counts reads of files."""

    def __init__(self, store: object) -> None:
        self._store = store
        self.reads: list[str] = []

    def __getattr__(self, name: str) -> object:
        def call(key: str, *arguments: object) -> object:
            self.reads.append(name)
            return getattr(self._store, name)(key, *arguments)

        return call


@pytest.fixture
def open_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenWorld]:
    """Slots over the same registry and disk each time; those before are closed."""
    monkeypatch.setattr(folder_fetch, "CHUNK_BYTES", CHUNK)
    made: list[SlotWorld] = []

    def open_one(disk: int = DISK, **settings: int) -> SlotWorld:
        while made:
            made.pop().store.close()
        made.append(SlotWorld(tmp_path, disk=disk, **settings))
        made[0].tier._store = CountedStore(made[0].objects)  # type: ignore[assignment]
        return made[0]

    yield open_one
    for world in made:
        world.store.close()


def reads(world: SlotWorld) -> list[str]:
    store = world.tier._store
    assert isinstance(store, CountedStore)
    return store.reads


def load(world: SlotWorld, adapter: Adapter) -> str:
    """Brings the adapter into its folder, and checks both files. Returns where they came from."""
    tier = world.store.announce(adapter)
    folder = world.loaded(adapter)
    world.store.retract(adapter.digest)
    assert list(map(len, world.read(folder))) == [folder.size - adapter.bytes, adapter.bytes]
    assert world.read(folder) == tuple(
        world.objects.get(f"blobs/sha256/{name}").data for name in (adapter.config, adapter.weights)
    )
    assert tier in (folder.origin, "host", "disk"), "a file that was damaged is read from the store"
    return folder.origin


def kept(world: SlotWorld) -> list[Path]:
    assert world.cache is not None and not world.cache._writing
    return sorted(world.cache.directory.iterdir())


def test_an_adapter_comes_from_the_disk_after_a_restart(open_world: OpenWorld) -> None:
    world = open_world()
    adapter = put_adapter(world.objects, 1)
    assert load(world, adapter) == "absent"
    (file,) = kept(world)
    assert file.name == f"{adapter.digest}-{'b' * 64}" and file.stat().st_mode & 0o777 == 0o600
    world = open_world()
    size = file.stat().st_size
    assert world.store.tier(adapter.digest) == "disk"
    assert world.store.residents() == [Resident(adapter.digest, "disk", size, 0)]
    assert world.store.states().adapters == [AdapterState(adapter.digest, "disk", size)]
    assert load(world, adapter) == "disk"
    assert not reads(world)
    assert [resident.tier for resident in world.store.residents()] == ["host"]
    assert isinstance(world.acquire(adapter), Lease)
    world.vllm.end_load(world.store)
    assert [resident.tier for resident in world.store.residents()] == ["device"]


def test_an_adapter_that_left_host_memory_comes_from_the_disk(open_world: OpenWorld) -> None:
    world = open_world(memory=4000)
    first, second = put_adapter(world.objects, 1), put_adapter(world.objects, 2)
    assert [load(world, each) for each in (first, second, first, second)] == ["absent", "absent", "disk", "disk"]
    assert {(each.digest, each.tier) for each in world.store.residents()} == {
        (second.digest, "host"),
        (first.digest, "disk"),
    }


@pytest.mark.parametrize("place", ["config", "weights", "last"])
def test_a_damaged_file_is_read_from_the_store(open_world: OpenWorld, place: str) -> None:
    world = open_world()
    adapter = put_adapter(world.objects, 1)
    load(world, adapter)
    (file,) = kept(world)
    data = bytearray(file.read_bytes())
    data[{"config": -adapter.bytes - 1, "weights": -adapter.bytes, "last": -1}[place]] ^= 1
    file.write_bytes(data)
    world = open_world()
    assert load(world, adapter) == "absent"
    assert world.cache is not None and world.cache.damaged == 1
    assert kept(world) == [file], "it was written again"
    world = open_world()
    assert load(world, adapter) == "disk" and not reads(world)


@pytest.mark.parametrize("damage", ["head", "short", "long", "name", "part", "artifact", "empty"])
def test_what_is_not_an_adapters_files_is_removed_at_the_start(open_world: OpenWorld, damage: str) -> None:
    world = open_world()
    adapter = put_adapter(world.objects, 1)
    load(world, adapter)
    (file,) = kept(world)
    data = file.read_bytes()
    if damage == "name":
        file = file.rename(file.with_name("0" * 64 + file.name[64:]))
    elif damage == "part":
        file = file.rename(file.with_name(f"{file.name}.1-1.part"))
    else:
        changed = {"head": data[:60] + b"?" + data[61:], "short": data[:-1], "long": data + b"0", "empty": b""}
        file.write_bytes(changed.get(damage, b"GARNISH1" + data[8:]))
    world = open_world()
    assert not kept(world) and world.store.tier(adapter.digest) == "absent"
    assert load(world, adapter) == "absent"


def test_files_that_the_registry_does_not_name_any_more_are_dropped(open_world: OpenWorld) -> None:
    world = open_world()
    adapter, other = put_adapter(world.objects, 1), put_adapter(world.objects, 2)
    load(world, adapter)
    world = open_world()
    again = type(adapter)(adapter.digest, "", other.bytes, (8,), config=other.config, weights=other.weights)
    assert load(world, again) == "absent"


def test_a_file_that_vanishes_is_no_failure(open_world: OpenWorld) -> None:
    world = open_world()
    adapter = put_adapter(world.objects, 1)
    load(world, adapter)
    world = open_world()
    for file in kept(world):
        file.unlink()
    assert load(world, adapter) == "absent"


def test_wrong_files_of_the_store_are_not_kept(open_world: OpenWorld) -> None:
    world = open_world()
    adapter = put_adapter(world.objects, 1)
    world.objects.put(f"blobs/sha256/{adapter.weights}", b"x" * adapter.bytes)
    folder = world.tier.load(adapter)
    world.until(lambda: folder.failed)
    assert folder.failure is not None and folder.failure.damaged
    assert not kept(world)


def test_a_load_that_nobody_wants_any_more_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_fetch, "CHUNK_BYTES", CHUNK)
    world = SlotWorld(tmp_path, held=True, disk=DISK)
    adapter = put_adapter(world.objects, 1)
    world.store.announce(adapter)
    world.until(world.held.reading.is_set)
    world.store.retract(adapter.digest)
    world.held.let.set()
    world.until(lambda: not world.files())
    world.until(lambda: not world.tier._leaving)
    assert not kept(world)
    world.store.close()


def test_least_recently_used_goes_first_and_evictions_reach_the_disk(open_world: OpenWorld) -> None:
    world = open_world()
    adapters = [put_adapter(world.objects, seed) for seed in range(3)]
    load(world, adapters[0])
    size = kept(world)[0].stat().st_size
    world = open_world(disk=2 * size + 10, memory=4000)
    for adapter in (adapters[1], adapters[0], adapters[2]):
        load(world, adapter)
    assert {file.name[:64] for file in kept(world)} == {adapters[0].digest, adapters[2].digest}
    assert world.store.evict(adapters[0].digest) and not world.store.evict(adapters[0].digest)
    assert {file.name[:64] for file in kept(world)} == {adapters[2].digest}
    assert world.store.tier(adapters[0].digest) == "absent"


def test_a_full_disk_costs_nothing_but_the_cache(open_world: OpenWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = open_world()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    adapter = put_adapter(world.objects, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        assert load(world, adapter) == "absent"
    assert not kept(world) and world.cache is not None and world.cache.failures == 1
    assert load(world, put_adapter(world.objects, 2)) == "absent"
    assert len(kept(world)) == 1


def test_a_node_without_a_cache_says_absent(open_world: OpenWorld) -> None:
    world = open_world(disk=0)
    adapter = put_adapter(world.objects, 1)
    assert world.cache is None and world.store.announce(adapter, Priority.REQUEST) == "absent"
    assert world.store.states().unnamed == 0


@given(
    order=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 2500), min_size=5, max_size=5),
)
def test_drawn_loads_over_a_small_memory_and_a_small_disk(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], sizes: list[int]
) -> None:
    """Each folder has its own files, whichever tier they came from; the disk never has more than its limit."""
    root = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder_fetch, "CHUNK_BYTES", CHUNK)
        world = SlotWorld(root, memory=3000, disk=6000)
        try:
            adapters = [put_adapter(world.objects, seed, size) for seed, size in enumerate(sizes)]
            for at in order:
                load(world, adapters[at])
                assert sum(file.stat().st_size for file in kept(world)) <= 6000
        finally:
            world.store.close()
