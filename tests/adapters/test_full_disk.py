"""A disk that is full under a registry in a directory: refused as an outage, and nothing of it is visible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapters.base_model import BaseModel
from adapters.deployment import AdapterUpload
from adapters.errors import NotFound
from adapters.local_store import LocalStore
from adapters.registry import Registry

DEPLOY = """
import os, resource, sys
from pathlib import Path
from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.registry import Registry

class Filling(LocalStore):
    def put_if_absent(self, key, data):
        if self.left == 0:  # no file takes a byte from now on
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        self.left -= 1
        return super().put_if_absent(key, data)

stores, base, folder, most = sys.argv[1:]
base = load_base_model(Path(base))
config, weights = Path(folder, "adapter_config.json"), Path(folder, "adapter_model.safetensors")
for writes in range(int(most) + 1):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    try:
        store = Filling(Path(stores, str(writes)))
        store.left = writes
        Registry(store, base).deploy("acme", "f", AdapterUpload(config.read_bytes(), weights))
    except StoreUnavailable as error:
        print(error, flush=True)
    finally:
        os._exit(0)
"""
MAX_WRITES = 4
"""Of a deploy, before its record's."""


@pytest.fixture(scope="module")
def full(
    tmp_path_factory: pytest.TempPathFactory, good: tuple[bytes, Path], base_dir: Path
) -> list[tuple[LocalStore, str]]:
    """Stores on disks that were full after no write of a deploy, after one, and so on; and what the deploy told."""
    folder = tmp_path_factory.mktemp("full")
    command = [sys.executable, "-c", DEPLOY, str(folder), str(base_dir), str(good[1].parent), str(MAX_WRITES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert str(folder) not in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) == MAX_WRITES + 1, done.stderr
    return [(LocalStore(folder / str(writes)), line) for writes, line in enumerate(lines)]


@pytest.mark.parametrize("writes", range(MAX_WRITES + 1))
def test_a_deploy_onto_a_disk_that_fills_up(
    full: list[tuple[LocalStore, str]], base: BaseModel, good: tuple[bytes, Path], writes: int
) -> None:
    store, told = full[writes]
    assert "File too large" in told
    assert list((store.root / ".tmp").iterdir()) == []
    registry = Registry(store, base)
    assert registry.functions("acme") == ([], None)
    with pytest.raises(NotFound):
        registry.resolve("acme", "f")
    assert registry.deploy("acme", "f", AdapterUpload(*good)).version == (2 if writes == 4 else 1)
