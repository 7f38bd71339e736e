"""Deploys by processes of their own: many of one name at once, and one that is killed at any write."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peft_files import changed
from test_registry import deploy

from adapters.base_model import BaseModel
from adapters.errors import NotFound
from adapters.local_store import LocalStore
from adapters.registry import Registry

DEPLOY = """
import json, multiprocessing, sys
from pathlib import Path
from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.local_store import LocalStore
from adapters.registry import Registry

store, base, weights, *configs = sys.argv[1:]
fork = multiprocessing.get_context("fork")
start = fork.Barrier(3)

def deploy(first):
    registry = Registry(LocalStore(Path(store)), load_base_model(Path(base)))
    start.wait(60)
    uploads = [AdapterUpload(config.encode(), Path(weights)) for config in configs[first::3]]
    return [registry.deploy("acme", "f", upload).version for upload in uploads]

with fork.Pool(3) as pool:  # a process for each
    print(json.dumps(pool.map(deploy, range(3), 1)))
"""

KILLED = """
import os, signal, sys
from pathlib import Path
from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.local_store import LocalStore
from adapters.registry import Registry

class Mortal(LocalStore):
    def put_if_absent(self, key, data):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().put_if_absent(key, data)

stores, base, folder, most = sys.argv[1:]
base = load_base_model(Path(base))
config, weights = Path(folder, "adapter_config.json"), Path(folder, "adapter_model.safetensors")
for writes in range(int(most) + 1):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    try:
        store = Mortal(Path(stores, str(writes)))
        store.left = writes
        Registry(store, base).deploy("acme", "f", AdapterUpload(config.read_bytes(), weights))
    finally:
        os._exit(1)
"""
MAX_WRITES = 4
"""Of a deploy, before its record's."""


def test_deploys_of_one_name_from_several_processes_all_succeed(
    registry: Registry, good: tuple[bytes, Path], base_dir: Path
) -> None:
    store = registry.store
    assert isinstance(store, LocalStore)
    configs = [changed(good[0], lora_alpha=10 + number).decode() for number in range(6)]
    command = [sys.executable, "-c", DEPLOY, str(store.root), str(base_dir), str(good[1]), *configs]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    numbers = [number for each in json.loads(done.stdout) for number in each]
    record = registry.function("acme", "f")
    assert len(set(numbers)) == 6
    assert sorted(numbers) == [entry.version for entry in record.versions]
    assert len({entry.digest for entry in record.versions}) == 6
    assert {manifest.version: manifest.digest for manifest in registry.versions("acme", "f")} == {
        entry.version: entry.digest for entry in record.versions
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, good: tuple[bytes, Path], base_dir: Path) -> list[LocalStore]:
    """Stores as a deploy left them that was killed after no write, after one, and so on."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", KILLED, str(folder), str(base_dir), str(good[1].parent), str(MAX_WRITES)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    assert [int(line) for line in done.stdout.split()] == [-signal.SIGKILL] * (MAX_WRITES + 1)
    return [LocalStore(folder / str(writes)) for writes in range(MAX_WRITES + 1)]


@pytest.mark.parametrize("writes", range(MAX_WRITES + 1))
def test_a_deploy_killed_at_any_write_leaves_nothing_visible(
    killed: list[LocalStore], base: BaseModel, good: tuple[bytes, Path], writes: int
) -> None:
    store = killed[writes]
    registry = Registry(store, base)
    assert len(store.list("")) == writes
    assert registry.functions("acme") == ([], None)
    with pytest.raises(NotFound):
        registry.resolve("acme", "f")
    deployed = deploy(registry, good)
    assert deployed.version == (2 if writes == 4 else 1)
    assert registry.resolve("acme", "f").digest == deployed.digest
