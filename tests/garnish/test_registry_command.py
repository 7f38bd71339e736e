"""`garnish registry gc|verify` over a registry in a directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.local_store import LocalStore
from adapters.registry import Registry


@pytest.fixture
def folder(tmp_path: Path, stories_dir: Path, stories_adapters: dict[str, Path]) -> Path:
    """A service file, and the registry that it names with one function and an orphan of two days."""
    (tmp_path / "serverless.yml").write_text("service: s\nbase_model: ./base\nregistry: ./store\n")
    store, files = LocalStore(tmp_path / "store"), stories_adapters["dragon"]
    registry = Registry(store, load_base_model(stories_dir, "stories260K"))
    config = (files / "adapter_config.json").read_bytes()
    registry.deploy("acme", "dragon", AdapterUpload(config, files / "adapter_model.safetensors"))
    orphan = f"blobs/sha256/{'0' * 64}"
    store.put(orphan, b"12345")
    os.utime(tmp_path / "store" / orphan, (time.time() - 2 * 86400,) * 2)
    return tmp_path


def test_gc(folder: Path, command_line: Callable[..., Any]) -> None:
    orphan = folder / "store" / "blobs" / "sha256" / ("0" * 64)
    dry = command_line("registry", "gc", "--dry-run")
    assert dry.returncode == 0
    assert dry.stdout.splitlines() == [
        f"would remove blobs/sha256/{'0' * 64} (5 B)",
        "1 files, 0 artifacts and 0 manifests, 5 B would be removed; 3 files and artifacts stay",
    ]
    assert orphan.exists()
    done = json.loads(command_line("registry", "gc", "--json").stdout)
    assert (done["blobs"], done["bytes"], done["objects"]) == (1, 5, [f"blobs/sha256/{'0' * 64}"])
    assert not orphan.exists()
    assert "0 files" in command_line("registry", "gc").stdout


def test_verify(folder: Path, command_line: Callable[..., Any]) -> None:
    sound = command_line("registry", "verify")
    assert (sound.returncode, sound.stdout) == (0, "1 versions, 4 objects read; 0 versions are damaged\n")
    artifact = next((folder / "store" / "artifacts").rglob("*/*/*"))
    artifact.unlink()
    harmed = command_line("registry", "verify", "--json")
    assert harmed.returncode == 1
    (damage,) = json.loads(harmed.stdout)["damages"]
    assert (damage["version"], damage["problem"]) == ("acme/dragon:1", "is missing")
    assert damage["key"].endswith(artifact.name)


def test_a_registry_that_is_not_there(folder: Path, command_line: Callable[..., Any]) -> None:
    (folder / "serverless.yml").write_text("service: s\nbase_model: ./base\n")
    done = command_line("registry", "gc", "--state", "elsewhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "name the state directory with --state" in done.stderr
    assert not (folder / "elsewhere").exists(), "looking makes nothing"
