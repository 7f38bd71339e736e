"""Merged or not, the DLORA baseline computes what the engine's own way does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cold_rig import make_adapters
from benchmarks.dlora import MergingLora
from cluster.messages import Adapter
from node_agent.runner.lora import SegmentedLora
from tests.support.local_engine import LocalEngine

Served = tuple[LocalEngine, list[Adapter]]


@pytest.fixture(params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, stories_dir: Path, tmp_path: Path) -> Iterator[Served]:
    engine = LocalEngine(
        stories_dir, tmp_path / "registry", dtype=request.param, threads=1, adapter_memory=16 << 20,
        host_memory=32 << 20, kv_memory=16 << 20,
    )  # fmt: skip
    yield engine, [engine.deploy(path) for path in make_adapters(stories_dir, tmp_path / "made", [8, 8, 16], 0)]
    engine.assert_clean()
    engine.close()


def test_answers_are_those_of_the_engine(served: Served) -> None:
    engine, adapters = served
    batches = [[0], [0], [1], [0, 1, 2], [2, 2]]

    def answer(batch: list[int]) -> list[list[int]]:
        requests = [engine.submit([5, 6, 7, 8 + i], 10, adapters[i], ignore_eos=True) for i in batch]
        engine.run()
        return engine.results(requests)

    store = engine.engine.store
    engine.engine.start_lora = lambda batch, _: SegmentedLora(batch, store.weights)
    wanted = [answer(batch) for batch in batches]
    dlora = MergingLora(engine.engine)
    engine.engine.start_lora = dlora.start
    found = [answer(batch) for batch in batches]
    if engine.engine.runner.dtype.itemsize == 4:
        assert found == wanted
    else:  # merging rounds to bf16 at another place; a batch of several adapters is not merged
        assert found[3] == wanted[3]
    assert found[1] == found[0]
    assert dlora.merges == 3, "the second call finds its adapter merged already, the mixed batch merges none"
    dlora.unmerge()
    engine.engine.start_lora = lambda batch, _: SegmentedLora(batch, store.weights)
    assert [answer(batch) for batch in batches] == wanted, "the base's weights are back"
