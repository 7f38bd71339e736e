"""The fake NVML in place of the real one."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pynvml
import pytest

from tests.node_agent.gpu.fake_nvml import FUNCTIONS, FakeNvml, build

MakeNvml = Callable[..., FakeNvml]


@pytest.fixture(scope="session")
def whole_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def make_nvml(whole_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNvml]:
    """Makes the library, and has pynvml load it from now on. What hangs goes on at the end of the test."""
    built: list[FakeNvml] = []

    def make(missing: Collection[str] = ()) -> FakeNvml:
        made = build(tmp_path, missing) if missing else Path(shutil.copy(whole_nvml, tmp_path))
        fake = FakeNvml(made)
        built.append(fake)
        monkeypatch.setattr(pynvml, "CDLL", lambda name: ctypes.CDLL(str(fake.path)))
        monkeypatch.setattr(pynvml, "nvmlLib", None)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return fake

    yield make
    for fake in built:
        for name in FUNCTIONS:
            fake.set(name)
