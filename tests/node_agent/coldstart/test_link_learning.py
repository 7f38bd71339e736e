"""What plans learn of the link: loads that take four times what the profile says are forecast as long."""

from __future__ import annotations

from pathlib import Path

from benchmarks.local_engine import MakeEngine
from benchmarks.peft_reference import ALL_TARGETS, make_adapter
from node_agent.adapter_memory.link import Link
from node_agent.config import LinkConfig

PROFILED, REAL = 4e6, 1e6
"""Bytes a second."""
CALLS = 12


def test_forecasts_of_loads_come_to_what_they_take(make_engine: MakeEngine, stories_dir: Path, tmp_path: Path) -> None:
    path = make_adapter(stories_dir, tmp_path / "a", 0, r=16, lora_alpha=16, target_modules=ALL_TARGETS)
    engine = make_engine(cpu_workers=0, load_link=LinkConfig(PROFILED))
    store, starts = engine.engine.store, engine.engine.cold_start
    store.loader.device_link = Link(LinkConfig(REAL))
    adapter = engine.deploy(path)
    engine.submit([1, 403], 1, adapter)
    engine.run()
    for _ in range(CALLS):
        assert store.discard(adapter.digest), "it stays in host memory"
        engine.submit([1, 403, 407], 2, adapter, ignore_eos=True)
        engine.run()
    assert starts.link is not None
    assert starts.link.cost.bandwidth < REAL / 0.75
