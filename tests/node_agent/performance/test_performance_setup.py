"""Where a node's performance model comes from: its file, a short sweep, or nowhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.local_engine import LocalEngine, MakeEngine
from cluster.node_table import ASSUMED
from cluster.performance_file import read_performance, write_performance
from cluster.performance_model import DecodeModel, PrefillModel, Transfer
from node_agent.coldstart.cold_starts import WAYS
from node_agent.coldstart.profile import LinkCost, Profile, ProfileKey
from node_agent.config import EngineConfig, LinkConfig
from node_agent.engine.batch import Row
from node_agent.performance import setup, sweep
from node_agent.performance.links import measure_store, store_transfer
from node_agent.performance.setup import (
    exposed_share,
    measure_performance,
    model_key,
    performance_file,
    use_performance,
)
from node_agent.performance.terms import decode_sample, prefill_sample
from node_agent.types import StepOutput
from tests.cluster.measured import PROFILE

DECODE = DecodeModel(0.02, 2e-3, 1e-6, 2e-5, "adapter_ranks")
COLD_KEY = ProfileKey("fingerprint", "float32", "cpu", 1, 0)
PREFILL = PrefillModel(0.01, 1e-3, 1e-7, 1e-6)


@pytest.fixture
def engine(make_engine: MakeEngine) -> LocalEngine:
    return make_engine()


@pytest.fixture
def known(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """Its passes take what DECODE and PREFILL say, by the sweep's clock."""
    clock, real = [0.0], engine.engine.hot.forward

    def forward(rows: list[Row], n_decode: int) -> StepOutput:
        if n_decode:
            sample = decode_sample(rows, 0.0)
            clock[0] += DECODE.seconds(sample.rows, sample.contexts, sample.adapter_ranks)
        else:
            prompts = prefill_sample(rows, 0.0)
            clock[0] += PREFILL.seconds(prompts.tokens, prompts.squares, prompts.token_ranks)
        return real(rows, n_decode)

    monkeypatch.setattr(engine.engine.hot, "forward", forward)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=lambda: 0.0))
    return engine


def config_of(engine: LocalEngine, profile: Path | None, **settings: Any) -> EngineConfig:
    registry = str(engine.engine.store.loader.store.root)  # type: ignore[attr-defined]
    return EngineConfig(
        model_dir=str(engine.model_dir),
        base_id="stories",
        registry=registry,
        profile=None if profile is None else str(profile),
        **settings,
    )


def test_without_a_file_a_node_measures_itself_and_keeps_it(known: LocalEngine, tmp_path: Path) -> None:
    profile = tmp_path / "profiles" / "node-1.json"
    use_performance(known.engine, config_of(known, profile), known.base)
    drift = known.engine.drift
    assert drift is not None
    assert drift.measured.decode.rank_term == "adapter_ranks"
    assert drift.measured.decode.seconds(4, 100, 64) == pytest.approx(DECODE.seconds(4, 100, 64), rel=1e-3)
    assert drift.measured.prefill.seconds(100, 10_000, 800) == pytest.approx(
        PREFILL.seconds(100, 10_000, 800), rel=1e-3
    )
    assert drift.measured.from_store == ASSUMED.from_store
    file = performance_file(str(profile))
    assert file == tmp_path / "profiles" / "node-1.performance.json"
    stored = read_performance(file, model_key(known.engine, known.base))
    assert not stored.thorough
    assert stored.decode.quality.r2 == pytest.approx(1.0)


def test_a_file_of_this_node_is_used(known: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_performance(known.engine, config_of(known, tmp_path / "a.json"), known.base)
    file = performance_file(str(tmp_path / "a.json"))
    stored = read_performance(file, None)
    other = replace(
        stored, decode=replace(stored.decode, model=replace(DECODE, base=0.5)), from_store=Transfer(0.5, 1e6)
    )
    write_performance(other, file)
    monkeypatch.setattr(setup, "START_BUDGET", 0.0)  # nothing can be measured now
    known.engine.drift = None
    link = LinkConfig(bandwidth=1e6, latency=0.25)
    use_performance(known.engine, config_of(known, tmp_path / "a.json", store_link=link), known.base)
    drift = known.engine.drift
    assert drift is not None
    assert drift.measured.decode.base == 0.5
    assert drift.measured.from_store == Transfer(0.75, 5e5)


@pytest.mark.parametrize("damage", ["key", "text", "none"])
def test_what_can_not_be_used_is_told_and_none_is_published(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    monkeypatch.setattr(setup, "START_BUDGET", 0.0)
    file = performance_file(str(tmp_path / "a.json"))
    if damage == "text":
        file.write_text('{"key": ')
    elif damage == "key":
        write_performance(PROFILE, file)
    before = file.read_bytes() if file.exists() else None
    use_performance(engine.engine, config_of(engine, tmp_path / "a.json"), engine.base)
    assert engine.engine.drift is None
    told = [str(getattr(record, "reason", "")) for record in caplog.records]
    assert any("all the time" in line for line in told)
    assert any("run `garnish profile`" in line for line in told) == (damage != "none")
    assert (file.read_bytes() if file.exists() else None) == before


def test_a_thorough_measurement(
    known: LocalEngine, stories_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter in the registry, reads from it are measured, too."""
    monkeypatch.setattr(setup, "LONG", dataclasses.replace(setup.LONG, rounds=1, cache=2048))
    known.deploy(next(iter(stories_adapters.values())))
    config = config_of(known, None)
    told: list[str] = []
    found = measure_performance(known.engine, config, known.base, lambda text, _: told.append(text))
    assert found.thorough
    assert found.decode.model.rank_term == "adapter_ranks"
    assert found.decode.model.per_rank == pytest.approx(DECODE.per_rank, rel=1e-3)
    assert found.prefill.model.per_token2 == pytest.approx(PREFILL.per_token2, rel=1e-3)
    assert list(dict.fromkeys(told)) == ["writing the cache", "measuring passes", "measuring reads from the store"]
    assert 0 <= found.exposed_share <= 1
    assert [form.kernel for form in found.paper] == ["bgmv", "mbgmv"]
    assert found.from_store is None or found.from_store.bandwidth > 0


def test_an_empty_store_tells_nothing(engine: LocalEngine) -> None:
    assert measure_store(config_of(engine, None), engine.base) is None


def test_a_simulated_link_counts_beside_the_store() -> None:
    link = LinkConfig(1e6, 0.2)
    assert store_transfer(None, None) == ASSUMED.from_store
    assert store_transfer(Transfer(0.1, 1e6), None) == Transfer(0.1, 1e6)
    assert store_transfer(None, link) == Transfer(0.2, 1e6)
    both = store_transfer(Transfer(0.1, 1e6), link)
    assert (both.latency, both.bandwidth) == pytest.approx((0.3, 5e5))


def test_the_slower_the_link_the_more_of_a_load_is_exposed(engine: LocalEngine) -> None:
    """All of it where every plan is to wait, or where loads are too short to be worth hiding."""
    shares = {}
    for bandwidth in (1e12, 1e8, 1e6, 1e4):
        profile = Profile(COLD_KEY, ((64, 1e-3), (512, 8e-3)), None, LinkCost(0.0, bandwidth))
        shares[bandwidth] = exposed_share(profile, WAYS["auto"], engine.engine, engine.base)
        assert exposed_share(profile, WAYS["wait"], engine.engine, engine.base) == pytest.approx(1.0)
    assert shares[1e12] == pytest.approx(1.0)
    assert 0 < shares[1e8] < 0.4 < shares[1e6] < shares[1e4] <= 1
    assert shares[1e4] > 0.95
