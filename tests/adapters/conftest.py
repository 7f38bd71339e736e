from __future__ import annotations

from pathlib import Path

import pytest
from peft_files import adapter, tiny_model

from adapters.base_model import BaseModel, load_base_model
from adapters.local_store import LocalStore
from adapters.registry import Registry
from adapters.store import ObjectStore


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("base") / "tiny-llama"
    tiny_model().save_pretrained(target)
    return target


@pytest.fixture(scope="session")
def base(base_dir: Path) -> BaseModel:
    return load_base_model(base_dir)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """(config, weights) of a plain adapter of the tiny base: r 4 on q and v."""
    return adapter(tmp_path_factory.mktemp("good"), r=4, lora_alpha=8)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "registry")


@pytest.fixture
def registry(store: ObjectStore, base: BaseModel) -> Registry:
    return Registry(store, base)
