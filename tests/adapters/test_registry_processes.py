"""Deploys by processes of their own: many of one name at once, and one that is killed at any write."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from peft_files import adapter
from test_registry import deploy

from adapters.errors import NotFound
from adapters.local_store import LocalStore
from adapters.registry import Registry

DEPLOY = """
import sys
from pathlib import Path
from adapters.base_model import load_base_model
from adapters.local_store import LocalStore
from adapters.registry import Registry
store, base, tenant, name, *folders = sys.argv[1:]
registry = Registry(LocalStore(Path(store)), load_base_model(Path(base)))
print("ready", flush=True)
sys.stdin.readline()
for folder in folders:
    done = registry.deploy(
        tenant, name, Path(folder, "adapter_config.json").read_bytes(), Path(folder, "adapter_model.safetensors")
    )
    print(done.version, flush=True)
"""

KILLED = """
import os, signal, sys
from pathlib import Path
from adapters.base_model import load_base_model
from adapters.local_store import LocalStore
from adapters.registry import Registry
store, base, folder, writes = sys.argv[1:]

class Mortal(LocalStore):
    left = int(writes)
    def put_if_absent(self, key, data):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        return super().put_if_absent(key, data)

registry = Registry(Mortal(Path(store)), load_base_model(Path(base)))
config, weights = Path(folder, "adapter_config.json"), Path(folder, "adapter_model.safetensors")
registry.deploy("acme", "f", config.read_bytes(), weights)
"""


def test_deploys_of_one_name_from_several_processes_all_succeed(
    registry: Registry, base_dir: Path, tmp_path: Path
) -> None:
    store = registry.store
    assert isinstance(store, LocalStore)
    folders = [tmp_path / f"adapter-{index}" for index in range(6)]
    for index, folder in enumerate(folders):
        adapter(folder, r=4, lora_alpha=10 + index)
    start = [sys.executable, "-c", DEPLOY, str(store.root), str(base_dir), "acme", "f"]
    workers = [
        subprocess.Popen(
            [*start, *map(str, folders[index::3])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for index in range(3)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    outputs = [worker.communicate("go\n", timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    numbers = [int(line) for output in outputs for line in output.split()]
    record = registry.function("acme", "f")
    assert len(set(numbers)) == 6
    assert sorted(numbers) == [entry.version for entry in record.versions]
    assert len({entry.digest for entry in record.versions}) == 6
    assert {manifest.version: manifest.digest for manifest in registry.versions("acme", "f")} == {
        entry.version: entry.digest for entry in record.versions
    }


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4])
def test_a_deploy_killed_at_any_write_leaves_nothing_visible(
    registry: Registry, good: tuple[bytes, Path], base_dir: Path, writes: int
) -> None:
    store = registry.store
    assert isinstance(store, LocalStore)
    arguments = [str(store.root), str(base_dir), str(good[1].parent), str(writes)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(store.list("")) == writes
    assert registry.functions("acme") == ([], None)
    with pytest.raises(NotFound):
        registry.resolve("acme", "f")
    deployed = deploy(registry, good)
    assert deployed.version == (2 if writes == 4 else 1)
    assert registry.resolve("acme", "f").digest == deployed.digest
