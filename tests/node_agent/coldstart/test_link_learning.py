"""What plans learn of the link from loads, alone and several at once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from cluster.messages import Adapter
from node_agent.adapter_memory.link import Link
from node_agent.config import LinkConfig
from node_agent.cores import spare_cores
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, make_adapter

PROFILED = 4e6
"""Bytes per second."""
CALLS = 12
BURSTS = 6


def discard(engine: LocalEngine, adapter: Adapter) -> None:
    """Takes the adapter off the device, once its load has ended; it stays in host memory."""
    until = time.monotonic() + 60.0
    while not engine.engine.store.discard(adapter.digest):
        assert time.monotonic() < until, "its load ends"
        engine.step()


def test_forecasts_of_loads_come_to_what_they_take(make_engine: MakeEngine, stories_dir: Path, tmp_path: Path) -> None:
    path = make_adapter(stories_dir, tmp_path / "a", 0, r=16, lora_alpha=16, target_modules=ALL_TARGETS)
    profiled, real = 1.6e7, 4e6
    engine = make_engine(cpu_workers=0, load_link=LinkConfig(profiled))
    store, starts = engine.engine.store, engine.engine.cold_start
    store.loader.device_link = Link(LinkConfig(real))
    adapter = engine.deploy(path)
    engine.submit([1, 403], 1, adapter)
    engine.run()
    for _ in range(CALLS):
        discard(engine, adapter)
        engine.submit([1, 403, 407], 2, adapter, ignore_eos=True)
        engine.run()
    assert starts.link is not None
    assert starts.link.cost.bandwidth < real / 0.75


@pytest.fixture(scope="module")
def directories(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of everything in every layer, of several sizes."""
    root = tmp_path_factory.mktemp("sizes")
    return [
        make_adapter(stories_dir, root / f"a{i}", i, r=rank, lora_alpha=rank, target_modules=ALL_TARGETS)
        for i, rank in enumerate([4, 8, 8, 16, 16, 16, 32, 32])
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_bursts_of_loads_do_not_change_what_is_known_of_the_link(
    make_engine: MakeEngine, directories: list[Path], workers: int
) -> None:
    """Loads join and leave the link while others cross, and workers' results cross it, too."""
    if workers and not spare_cores(1):
        pytest.skip("NOT RUN: a CPU worker needs a core beside the engine's")
    rng = random.Random(workers)
    engine = make_engine(cpu_workers=workers, load_link=LinkConfig(PROFILED))
    starts, functions = engine.engine.cold_start, []
    for path in directories:
        functions.append(engine.deploy(path))
        engine.submit([1, 403], 1, functions[-1])
        engine.run()
    learnt, called = [], functions
    for _ in range(BURSTS):
        for each in called:
            discard(engine, each)
        called = rng.sample(functions, rng.randint(2, len(functions)))
        for each in called:
            engine.submit([1, 403, 407], 2, each, ignore_eos=True)
            for _ in range(rng.randint(0, 3)):
                engine.step()
        engine.run()
        assert starts.link is not None
        learnt.append(starts.link.cost.bandwidth)
    # A host that stalls makes loads seem slower, never faster.
    assert all(PROFILED / 3 < each < PROFILED * 1.4 for each in learnt), learnt


def test_a_load_that_began_as_a_prefetch_says_nothing_of_the_link(
    make_engine: MakeEngine, stories_dir: Path, tmp_path: Path
) -> None:
    path = make_adapter(stories_dir, tmp_path / "a", 0, r=16, lora_alpha=16, target_modules=ALL_TARGETS)
    engine = make_engine(cpu_workers=0, load_link=LinkConfig(PROFILED))
    adapter, store = engine.deploy(path), engine.engine.store
    request = engine.submit([1, 403], 4, adapter, ignore_eos=True)
    engine.run(until=lambda: store.on_device(adapter.digest) and len(engine.outcomes[request].tokens) > 1)
    lease = engine.engine.running[request].lease
    assert lease is not None
    size, seconds = store.crossing(lease)
    assert size >= sum(store.layout(lease).moved) and seconds > 0
    store.device[adapter.digest].prefetched = True
    assert store.crossing(lease) == (0, 0.0)
    engine.run()
