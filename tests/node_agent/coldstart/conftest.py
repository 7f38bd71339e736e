"""One engine with a CPU worker for the tests of a file: to start a worker takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from node_agent.coldstart import keeper
from node_agent.runner.transformers_runner import LoadModel
from tests.node_agent.coldstart.kept import as_started
from tests.support.local_engine import LocalEngine


@pytest.fixture(scope="module")
def soon_again() -> Iterator[None]:
    """Workers that tests of a file kill, one after the other, are started again without longer and longer pauses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "MAX_BACKOFF_S", keeper.FIRST_BACKOFF_S)
        yield


@pytest.fixture(scope="module")
def kept_engine(
    stories_dir: Path, load_stories: LoadModel, soon_again: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalEngine]:
    """With one CPU worker, and room on the device for some adapters. Tests get it by `worker_engine`."""
    engine = LocalEngine(
        stories_dir, tmp_path_factory.mktemp("kept") / "registry", load=load_stories, prefix_cache="auto",
        dtype="float32", threads=1, adapter_memory=2 << 20, host_memory=32 << 20, kv_memory=32 << 20,
        cpu_workers=1, max_rows=16, block_tokens=4,
    )  # fmt: skip
    with closing(engine):
        yield engine


@pytest.fixture
def worker_engine(kept_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    with as_started(kept_engine, monkeypatch) as engine:
        yield engine
