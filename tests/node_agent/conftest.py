"""An engine per test, which must end empty; drawn adapters, made once; PEFT as the reference."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from adapters.artifact import read_header
from cluster.messages import Adapter
from node_agent.adapter_memory import ranges
from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine import prefetcher
from node_agent.engine.prefetcher import Prefetcher
from node_agent.runner.transformers_runner import LoadModel, load_model
from tests.node_agent.adapter_world import Turnstile, World
from tests.node_agent.prefetch_world import MakePrefetcher, Stile, assert_nothing_held
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference, draw_adapter, make_adapter


@pytest.fixture(scope="session")
def load_stories(stories_dir: Path) -> LoadModel:
    """Loads stories260K as an engine does, once; each engine gets a copy, which takes a fraction of a load."""
    loaded: dict[torch.dtype | None, PreTrainedModel] = {}

    def load(model_dir: Path, device: torch.device, dtype: torch.dtype | None) -> PreTrainedModel:
        if model_dir != stories_dir or device.type != "cpu":
            return load_model(model_dir, device, dtype)
        if dtype not in loaded:
            loaded[dtype] = load_model(model_dir, device, dtype)
        return copy.deepcopy(loaded[dtype])

    return load


@pytest.fixture
def make_engine(stories_dir: Path, load_stories: LoadModel, tmp_path: Path) -> Iterator[MakeEngine]:
    """Builds engines in fp32; at the end of the test each must hold nothing."""
    engines: list[LocalEngine] = []

    def make(model_dir: Path | None = None, registry: Path | str | None = None, **settings: Any) -> LocalEngine:
        if settings.get("runner", "auto") in ("auto", "transformers", "cuda"):
            settings.setdefault("load", load_stories)
        settings.setdefault("prefix_cache", "auto")
        settings.setdefault("dtype", "float32")
        settings.setdefault("threads", 1)  # more only get in each other's way on so small a model
        settings.setdefault("adapter_memory", 8 << 20)
        settings.setdefault("host_memory", 32 << 20)
        settings.setdefault("kv_memory", 32 << 20)
        engine = LocalEngine(model_dir or stories_dir, registry or tmp_path / f"registry{len(engines)}", **settings)
        engines.append(engine)
        return engine

    yield make
    try:
        for engine in engines:
            engine.assert_clean()
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture(scope="session")
def reference(stories_dir: Path) -> PeftReference:
    return PeftReference(stories_dir)


@pytest.fixture(scope="session")
def drawn_adapters(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Twelve adapters over the forms that are served, with random weights (fp32, bf16 and fp16 files)."""
    rng = random.Random(20)
    root = tmp_path_factory.mktemp("drawn")
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    return [make_adapter(stories_dir, root / f"drawn{i}", i, dtypes[i % 3], **draw_adapter(rng, 5)) for i in range(12)]


@pytest.fixture(scope="session")
def world(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its adapters take seconds to make. Tests leave its objects as they were."""
    return World(stories_dir, tmp_path_factory.mktemp("world"))


@pytest.fixture
def make_store(world: World) -> Iterator[Callable[..., AdapterStore]]:
    made: list[AdapterStore] = []

    def make(**settings: object) -> AdapterStore:
        made.append(world.store(**settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def turnstile(world: World) -> Turnstile:
    return Turnstile(world.objects)


@pytest.fixture
def store(world: World, turnstile: Turnstile) -> Iterator[AdapterStore]:
    made = world.store(turnstile)  # type: ignore[arg-type]
    yield made
    turnstile.open_all()
    made.close()


@pytest.fixture
def by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is a range of its own."""
    monkeypatch.setattr(ranges, "FIRST_RANGE", 1)
    monkeypatch.setattr(ranges, "LARGEST_RANGE", 1)


@pytest.fixture
def adapter(world: World) -> Adapter:
    """One with bytes in every layer."""
    return next(a for a in world.adapters if all(b.size for b in read_header(world.objects, a.artifact).layers))


@pytest.fixture
def make_prefetcher(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePrefetcher]:
    """Stores with a prefetcher each; at the end of the test nothing is held, and memory is as its books say."""
    monkeypatch.setattr(prefetcher, "LOOK_INTERVAL_S", 0.0)
    made: list[tuple[AdapterStore, Prefetcher, Stile]] = []

    def make(waste: float | None = 0.25, **settings: object) -> tuple[AdapterStore, Prefetcher, Stile]:
        stile = Stile(world.objects)
        store = world.store(stile, **settings)  # type: ignore[arg-type]
        made.append((store, Prefetcher(store, waste), stile))
        return made[-1]

    yield make
    for store, made_prefetcher, stile in made:
        stile.open_all()
        made_prefetcher.clear()
        assert_nothing_held(store, made_prefetcher)
        store.close()
