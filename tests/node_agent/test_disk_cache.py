"""The disk cache: what it keeps, what it forgets, and that nothing it does wrong reaches a request."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from adapters.artifact import read_header
from cluster.messages import Adapter
from cluster.news import Resident
from node_agent.adapter_memory.cached_artifact import open_artifact_cache
from node_agent.adapter_memory.disk_cache import DiskCache
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import DiskCacheConfig
from tests.node_agent.adapter_world import Turnstile, World, assert_contents, lease, measured, until


@pytest.fixture
def open_store(world: World, tmp_path: Path) -> Iterator[Callable[..., tuple[AdapterStore, Turnstile]]]:
    """A store over the same cache directory each time; the one before is closed."""
    made: list[AdapterStore] = []

    def open_one(size: int = 64 << 20) -> tuple[AdapterStore, Turnstile]:
        while made:
            made.pop().close()
        turnstile = Turnstile(world.objects)
        turnstile.open_all()
        config = DiskCacheConfig(str(tmp_path / "cache"), size)
        made.append(world.store(turnstile, disk_cache=config))  # type: ignore[arg-type]
        return made[0], turnstile

    yield open_one
    for store in made:
        store.close()


def load(store: AdapterStore, world: World, adapter: Adapter) -> str:
    """Load it, check it bit for bit, give it back; returns where host memory had it from: its bytes may be there before
    they go on to the device."""
    held = lease(store, adapter)
    until(store, lambda: store.loaded(held))
    assert_contents(store, world, held)
    source = store.device[adapter.digest].host.origin
    store.release(held, [])
    return source


def kept(store: AdapterStore, count: int) -> list[Path]:
    """The cache's files, once there are `count`: a layer counts before it is on the disk."""
    assert store.cache is not None
    until(store, lambda: len(store.cache.contents()) == count)  # type: ignore[union-attr]
    return sorted(store.cache.directory.iterdir())


def size_of(world: World, adapter: Adapter) -> int:
    last = read_header(world.objects, adapter.artifact).layers[-1]
    return last.offset + last.size


def test_an_adapter_comes_from_the_disk_after_a_restart(world: World, open_store: Callable[..., tuple]) -> None:
    store, turnstile = open_store()
    adapter = world.adapters[0]
    assert load(store, world, adapter) == "absent"
    (file,) = kept(store, 1)
    assert file.read_bytes() == world.objects.get(adapter.artifact).data, "an artifact byte for byte"
    assert file.stat().st_mode & 0o777 == 0o600
    store, turnstile = open_store()
    assert store.residents() == [Resident(adapter.digest, "disk", size_of(world, adapter), 0)]
    assert store.announce(adapter) == "disk"
    assert load(store, world, adapter) == "disk"
    store.retract(adapter.digest)
    assert turnstile.reads == []
    assert [r.tier for r in store.residents()] == ["device"]


def test_a_damaged_layer_is_read_from_the_store(world: World, open_store: Callable[..., tuple]) -> None:
    store, _ = open_store()
    adapter = max(world.adapters, key=lambda a: a.bytes)
    load(store, world, adapter)
    (file,) = kept(store, 1)
    data = bytearray(file.read_bytes())
    layers = read_header(world.objects, adapter.artifact).layers
    data[layers[3].offset] ^= 1
    file.write_bytes(data)
    store, turnstile = open_store()
    load(store, world, adapter)
    assert turnstile.reads == [layers[3].offset], "only what was damaged, and what follows it in its range"
    assert store.cache.damaged == 1
    assert not file.exists() and not store.cache.has(adapter.digest)


@pytest.mark.parametrize("damage", ["header", "short", "name", "part"])
def test_what_is_no_artifact_is_removed_at_the_start(
    world: World, open_store: Callable[..., tuple], damage: str
) -> None:
    store, _ = open_store()
    load(store, world, world.adapters[0])
    (file,) = kept(store, 1)
    if damage == "header":
        data = bytearray(file.read_bytes())
        data[60] ^= 1
        file.write_bytes(data)
    elif damage == "short":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "name":
        file = file.rename(file.with_name("0" * 64 + file.name[64:]))
    else:
        file = file.rename(file.with_name(file.name + ".1-1.part"))
    store, _ = open_store()
    assert not file.exists() and store.cache.contents() == []
    assert load(store, world, world.adapters[0]) == "absent"


def test_a_file_that_vanishes_is_no_failure(world: World, open_store: Callable[..., tuple]) -> None:
    store, _ = open_store()
    load(store, world, world.adapters[0])
    (file,) = kept(store, 1)
    store, _ = open_store()
    file.unlink()
    assert load(store, world, world.adapters[0]) == "absent"


def test_least_recently_used_goes_first(world: World, open_store: Callable[..., tuple]) -> None:
    first, second, third = world.adapters[:3]
    sizes = [size_of(world, adapter) for adapter in (first, second, third)]
    store, _ = open_store(max(sum(sizes) - 1, 2 * max(sizes)))
    load(store, world, first)
    kept(store, 1)
    load(store, world, second)
    files = kept(store, 2)
    for at, file in enumerate(sorted(files, key=lambda path: path.name.startswith(first.digest))):
        os.utime(file, (1000 + at, 1000 + at))  # the first is the younger by now
    store, _ = open_store(sum(sizes) - 1)
    load(store, world, third)
    until(store, lambda: store.cache.has(third.digest))
    assert not store.cache.has(second.digest)
    assert sum(size for _, size in store.cache.contents()) < sum(sizes)
    assert {path.name[:64] for path in store.cache.directory.iterdir()} == {d for d, _ in store.cache.contents()}


def test_one_that_is_larger_than_the_cache_is_not_kept(world: World, open_store: Callable[..., tuple]) -> None:
    store, _ = open_store(4096)
    load(store, world, world.adapters[0])
    assert list(store.cache.directory.iterdir()) == [] and store.cache.failures == 0


def test_a_full_disk_costs_nothing_but_the_cache(world: World, open_store: Callable[..., tuple]) -> None:
    store, _ = open_store()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses larger files
    try:
        for adapter in world.adapters[:2]:
            assert load(store, world, adapter) == "absent"
        until(store, lambda: store.cache.failures == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(store.cache.directory.iterdir()) == []
    load(store, world, world.adapters[2])
    kept(store, 1)


def test_a_load_that_fails_leaves_no_file(world: World, open_store: Callable[..., tuple]) -> None:
    store, turnstile = open_store()
    adapter = max(world.adapters, key=lambda a: a.bytes)
    last = read_header(world.objects, adapter.artifact).layers[-1].offset

    def spoil(start: int, buffer: memoryview) -> None:
        buffer[-1] ^= 1  # the last layer of the range

    turnstile.spoil = spoil
    measured(store, adapter)
    until(store, lambda: last in turnstile.reads and not store.hosts._fetching)
    assert list(store.cache.directory.iterdir()) == []
    assert store.cache._writing == 0


def test_a_directory_has_one_owner(world: World, tmp_path: Path) -> None:
    config = DiskCacheConfig(str(tmp_path / "cache"), 1 << 20)
    first = open_artifact_cache(config, world.base)
    assert isinstance(first, DiskCache)
    assert open_artifact_cache(config, world.base) is None, "a node serves without"
    first.close()
    second = open_artifact_cache(config, world.base)
    assert second is not None
    second.close()
    (tmp_path / "file").write_text("")
    assert open_artifact_cache(DiskCacheConfig(str(tmp_path / "file"), 1 << 20), world.base) is None
