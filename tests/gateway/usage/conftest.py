from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from adapters.local_store import LocalStore
from adapters.store import ObjectStore
from gateway.usage import report as report_module


@pytest.fixture
def worlds_end_with_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an order of steps that was drawn is the order in which they are taken."""
    monkeypatch.setattr(report_module, "READERS", 1)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return LocalStore(tmp_path / "registry")
    return request.getfixturevalue("new_s3_store")()  # type: ignore[no-any-return]
