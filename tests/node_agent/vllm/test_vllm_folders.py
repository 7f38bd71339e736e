"""Adapters as folders in memory: what is fetched, checked, evicted and left behind."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from adapters.blobs import blob_key
from node_agent.adapter_memory.priority import Priority
from node_agent.vllm import folder_fetch, folders
from tests.node_agent.vllm.folder_world import BYTES, FolderWorld, put_adapter

REQUEST, PREDICTED = Priority.REQUEST, Priority.PREDICTED


@pytest.fixture
def world(tmp_path: Path) -> Iterator[FolderWorld]:
    made = FolderWorld(tmp_path)
    with closing(made.tier):
        yield made


@pytest.fixture
def held(tmp_path: Path) -> Iterator[FolderWorld]:
    """Reads of weights wait."""
    made = FolderWorld(tmp_path, held=True)
    with closing(made.tier):
        yield made
        made.held.let.set()


def test_a_folder_has_the_two_files_as_deployed(world: FolderWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_fetch, "CHUNK_BYTES", 700)
    adapter = put_adapter(world.objects, 1)
    folder = world.loaded(adapter)
    config, weights = world.read(folder)
    assert (hashlib.sha256(config).hexdigest(), hashlib.sha256(weights).hexdigest()) == (
        adapter.config,
        adapter.weights,
    )
    assert folder.size == world.tier.used == len(config) + BYTES
    assert folder.fetched == 1.0


def test_files_that_differ_from_their_names_are_refused(world: FolderWorld) -> None:
    for spoilt, text in (("config", "adapter_config"), ("weights", "adapter_model")):
        adapter = put_adapter(world.objects, len(text))
        world.objects.put(blob_key(getattr(adapter, spoilt)), b"other")
        folder = world.tier.load(adapter)
        world.until(lambda found=folder: found.failed)  # type: ignore[misc]
        assert folder.failure is not None and folder.failure.damaged and text in folder.failure.reason


def test_missing_and_unnamed_files_are_told(world: FolderWorld) -> None:
    adapter = put_adapter(world.objects, 1)
    world.objects.delete(blob_key(adapter.weights))
    folder = world.tier.load(adapter)
    world.until(lambda: folder.failed)
    assert folder.failure is not None and "missing" in folder.failure.reason and folder.failure.damaged
    unnamed = world.tier.load(type(adapter)("d" * 64, "", 1, (8,)))
    world.until(lambda: unnamed.failed)
    assert unnamed.failure is not None and "deploy it again" in unnamed.failure.reason


def test_a_failed_load_is_tried_again_after_a_while(world: FolderWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FAILURE_MEMORY_S", 0.0)
    adapter = put_adapter(world.objects, 1)
    weights = world.objects.get(blob_key(adapter.weights)).data
    world.objects.delete(blob_key(adapter.weights))
    folder = world.tier.load(adapter)
    world.until(lambda: folder.failed and world.tier.get(adapter.digest) is None)
    world.objects.put(blob_key(adapter.weights), weights)
    world.loaded(adapter)
    assert world.tier.used == folder.size + sum(each.size for each in world.tier.all())


def test_the_least_recently_called_folder_makes_room(tmp_path: Path) -> None:
    world = FolderWorld(tmp_path, memory=int(2.5 * BYTES))
    with closing(world.tier):
        adapters = [put_adapter(world.objects, at) for at in range(3)]
        for adapter in adapters[:2]:
            world.loaded(adapter)
            world.tier.record_call(adapter.digest)
        world.tier.record_call(adapters[0].digest)
        world.loaded(adapters[2])
        assert {folder.digest for folder in world.tier.all()} == {adapters[0].digest, adapters[2].digest}
        assert len(world.files()) == 2 and world.tier.used <= world.tier.memory


@pytest.mark.parametrize("protection", ["waiting", "held", "pinned"])
def test_folders_in_use_stay_and_the_next_load_waits(tmp_path: Path, protection: str) -> None:
    world = FolderWorld(tmp_path, memory=int(1.5 * BYTES))
    with closing(world.tier):
        first, second = (put_adapter(world.objects, at) for at in range(2))
        folder = world.loaded(first)
        if protection == "waiting":
            world.tier.announce(first.digest, REQUEST, ())
        elif protection == "held":
            folder.holds += 1
        else:
            world.tier.pinned = frozenset({first.digest})
        world.tier.announce(second.digest, REQUEST, ())
        other = world.tier.load(second)
        world.until(lambda: world.tier.lacks_room(second.digest))
        assert not other.complete
        if protection == "waiting":
            world.tier.retract(first.digest, REQUEST)
        elif protection == "held":
            folder.holds -= 1
        else:
            world.tier.pinned = frozenset()
        world.until(lambda: other.complete)


def test_an_adapter_larger_than_the_memory_blocks_no_other(tmp_path: Path) -> None:
    world = FolderWorld(tmp_path, memory=2 * BYTES)
    with closing(world.tier):
        large, small = put_adapter(world.objects, 1, 3 * BYTES), put_adapter(world.objects, 2)
        world.tier.load(large)
        world.until(lambda: world.tier.lacks_room(large.digest))
        world.loaded(small)


def test_a_load_that_nobody_wants_any_more_leaves_nothing(held: FolderWorld) -> None:
    """Its thread is amid a read when it is dropped."""
    adapter = put_adapter(held.objects, 1)
    held.tier.announce(adapter.digest, REQUEST, ())
    folder = held.tier.load(adapter)
    held.until(held.held.reading.is_set)
    held.tier.retract(adapter.digest, REQUEST)
    assert folder.abandoned and held.tier.get(adapter.digest) is None
    held.tier.poll()
    assert held.files(), "its thread still writes"
    assert held.tier.used > 0
    held.held.let.set()
    held.until(lambda: not held.files())
    held.until(lambda: not held.tier.used)
    held.loaded(adapter)


def test_a_prediction_evicts_nothing_that_it_must_spare(tmp_path: Path) -> None:
    world = FolderWorld(tmp_path, memory=int(1.5 * BYTES))
    with closing(world.tier):
        first, second = (put_adapter(world.objects, at) for at in range(2))
        world.loaded(first)
        world.tier.announce(second.digest, PREDICTED, frozenset({first.digest}))
        folder = world.tier.load(second)
        world.until(lambda: world.tier.lacks_room(second.digest))
        world.tier.announce(second.digest, REQUEST, ())
        world.until(lambda: folder.complete)
        assert world.tier.get(first.digest) is None


def test_a_full_memory_fails_the_load_alone(world: FolderWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = put_adapter(world.objects, 1)
    (world.root / "1").write_text("in the way")
    folder = world.tier.load(adapter)
    world.until(lambda: folder.failed)
    assert folder.failure is not None and not folder.failure.damaged
    (world.root / "1").unlink()
    world.loaded(put_adapter(world.objects, 2))


CHILD = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from node_agent.vllm.folders import MEMORY
from node_agent.vllm.own_folder import OwnFolder, keep_temporary_files_in
from node_agent.vllm.spawned import begin_spawned

def create() -> SharedMemory:
    memory = SharedMemory(create=True, size=4096)
    os.write(1, f"{MEMORY / memory.name}\\n".encode())  # what is printed goes to the log
    return memory

def run() -> None:
    begin_spawned()
    memory = create()
    time.sleep(600)

if __name__ == "__main__":
    folder = OwnFolder(MEMORY)
    (folder.path / "1").mkdir()
    keep_temporary_files_in(folder.path)
    print(folder.path, flush=True)
    memory = create()
    (folder.path / "vllm_dist_0123").touch()
    meeting = MEMORY / f"vllm_dist_0123-{os.getpid()}-[0-1]-cpushm"
    meeting.touch()
    print(meeting, flush=True)
    multiprocessing.get_context("spawn").Process(target=run).start()
    time.sleep(600)
"""


def test_folders_of_killed_processes_are_removed_and_of_living_ones_kept(world: FolderWorld, tmp_path: Path) -> None:
    """The whole group of processes is killed, as by a container's end: Python's process that removes shared memory
    too."""
    (tmp_path / "child.py").write_text(CHILD)
    command = [sys.executable, str(tmp_path / "child.py")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env) as child:
        assert child.stdout is not None
        paths = [Path(child.stdout.readline().strip()) for _ in range(4)]
        try:
            FolderWorld(tmp_path / "second").tier.close()
            assert all(path.exists() for path in paths) and world.root.is_dir()
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    FolderWorld(tmp_path / "third").tier.close()
    assert not any(path.exists() for path in paths) and world.root.is_dir()
