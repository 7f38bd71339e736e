from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
from peft_files import adapter, tiny_model

from adapters.base_model import BaseModel, load_base_model
from adapters.local_store import LocalStore
from adapters.open_store import open_store
from adapters.registry import Registry
from adapters.s3_store import S3Store
from adapters.s3_url import S3Place, parse_s3_url
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


@pytest.fixture(scope="session", params=["local", "s3"])
def new_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Makes addresses of empty stores, of each kind."""
    if request.param == "local":
        return lambda: str(tmp_path_factory.mktemp("local") / "store")
    request.getfixturevalue("s3_endpoint")
    return lambda: f"s3://garnish-tests/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def new_store(request: pytest.FixtureRequest, new_url: Callable[[], str]) -> Callable[[], ObjectStore]:
    """Makes empty stores, of each kind; those on S3 share one client."""
    if new_url().startswith("s3:"):
        return request.getfixturevalue("new_s3_store")  # type: ignore[no-any-return]
    return lambda: open_store(new_url())


@pytest.fixture(scope="session")
def open_again(new_url: Callable[[], str]) -> Callable[[str], ObjectStore]:
    """Opens the store at an address; those on S3 take turns with two clients, which take long to make."""
    if not new_url().startswith("s3:"):
        return open_store
    clients = cycle([S3Store(S3Place("garnish-tests")) for _ in range(2)])

    def opened(url: str) -> ObjectStore:
        store = copy.copy(next(clients))
        store.place = parse_s3_url(url)
        return store

    return opened


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()


@pytest.fixture
def make_store(url: str, open_again: Callable[[str], ObjectStore]) -> Callable[[], ObjectStore]:
    """Makes further clients of one and the same empty store."""
    return lambda: open_again(url)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return LocalStore(tmp_path / "registry")


@pytest.fixture
def registry(store: ObjectStore, base: BaseModel) -> Registry:
    return Registry(store, base)
