"""A disk that is full under a registry in a directory: refused as an outage, and nothing of it is visible."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adapters.base_model import BaseModel
from adapters.errors import NotFound
from adapters.local_store import LocalStore
from adapters.registry import Registry

DEPLOY = """
import resource, sys
from pathlib import Path
from adapters.base_model import load_base_model
from adapters.errors import StoreUnavailable
from adapters.local_store import LocalStore
from adapters.registry import Registry
store, base, folder, writes = sys.argv[1:]

class Filling(LocalStore):
    left = int(writes)
    def put_if_absent(self, key, data):
        if self.left == 0:  # no file takes a byte from now on
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        self.left -= 1
        return super().put_if_absent(key, data)

registry = Registry(Filling(Path(store)), load_base_model(Path(base)))
try:
    registry.deploy(
        "acme", "f", Path(folder, "adapter_config.json").read_bytes(), Path(folder, "adapter_model.safetensors")
    )
except StoreUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize("writes", [0, 1, 2, 3, 4])
def test_a_deploy_onto_a_disk_that_fills_up(
    tmp_path: Path, base: BaseModel, base_dir: Path, good: tuple[bytes, Path], writes: int
) -> None:
    store = LocalStore(tmp_path)
    command = [sys.executable, "-c", DEPLOY, str(tmp_path), str(base_dir), str(good[1].parent), str(writes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "File too large" in done.stdout and str(tmp_path) not in done.stdout
    assert list((tmp_path / ".tmp").iterdir()) == []
    registry = Registry(store, base)
    assert registry.functions("acme") == ([], None)
    with pytest.raises(NotFound):
        registry.resolve("acme", "f")
    assert registry.deploy("acme", "f", *good).version == (2 if writes == 4 else 1)
