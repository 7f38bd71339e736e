"""Where a node's performance model comes from: its file, a sweep, or nowhere."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from cluster.node_table import ASSUMED
from cluster.performance_file import read_performance, write_performance
from cluster.performance_model import DecodeModel, PrefillModel, Transfer
from node_agent.coldstart.cold_starts import MODES
from node_agent.coldstart.measure import measure_link
from node_agent.coldstart.profile import LinkCost, Profile, ProfileKey
from node_agent.config import EngineConfig, LinkConfig
from node_agent.engine.joining import Joined
from node_agent.engine.rows import Row
from node_agent.engine.stats import stats_of
from node_agent.performance import idle as idle_module
from node_agent.performance import setup, sweep
from node_agent.performance.cases import IDLE
from node_agent.performance.idle import IdleMeasurement
from node_agent.performance.links import measure_store
from node_agent.performance.reads import store_transfer
from node_agent.performance.setup import (
    exposed_share,
    measure_performance,
    model_key,
    use_performance,
)
from node_agent.performance.stored import performance_file
from node_agent.performance.terms import decode_sample, prefill_sample
from node_agent.runner.products import Products
from node_agent.types import StepOutput
from tests.cluster.measured import PROFILE
from tests.support.local_engine import LocalEngine, MakeEngine

DECODE = DecodeModel(0.02, 2e-3, 1e-6, 2e-5, "adapter_ranks")
COLD_KEY = ProfileKey("fingerprint", "float32", "cpu", 1, 0)
PREFILL = PrefillModel(0.01, 1e-3, 1e-7, 1e-6)
FEWER = {"rows": (1, 2, 4, 8), "draws": 1, "tokens": (16, 48, 128), "cache": 1024}
"""Of an effort: times that are given are fitted whatever it is."""


@pytest.fixture
def engine(make_engine: MakeEngine) -> LocalEngine:
    return make_engine()


@pytest.fixture
def known(engine: LocalEngine, known_times: Callable[[LocalEngine], None]) -> LocalEngine:
    known_times(engine)
    return engine


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> Callable[[LocalEngine], None]:
    return partial(take_known_times, monkeypatch)


def take_known_times(monkeypatch: pytest.MonkeyPatch, engine: LocalEngine) -> None:
    """From now on its passes take what DECODE and PREFILL say, by the sweep's clock."""
    clock, real = [0.0], engine.engine.hot.forward

    def forward(
        rows: list[Row],
        n_decode: int,
        gives_way: Callable[[], bool] | None = None,
        joined: Joined | None = None,
    ) -> StepOutput | None:
        if n_decode:
            sample = decode_sample(rows, 0.0)
            clock[0] += DECODE.seconds(sample.rows, sample.contexts, sample.adapter_ranks)
        else:
            prompts = prefill_sample(rows, 0.0)
            clock[0] += PREFILL.seconds(prompts.tokens, prompts.squares, prompts.token_ranks)
        return real(rows, n_decode, gives_way, joined)

    monkeypatch.setattr(engine.engine.hot, "forward", forward)
    few = dataclasses.replace(IDLE, rounds=2, **FEWER)  # a third round would take the same times
    monkeypatch.setattr(idle_module, "IDLE", few)
    monkeypatch.setattr(sweep, "time", SimpleNamespace(perf_counter=lambda: clock[0], monotonic=lambda: 0.0))


def config_of(engine: LocalEngine, profile: Path | None, **settings: Any) -> EngineConfig:
    registry = str(engine.engine.store.loader.store.root)  # type: ignore[attr-defined]
    return EngineConfig(
        model_dir=str(engine.model_dir),
        base_id="stories",
        registry=registry,
        profile=None if profile is None else str(profile),
        **settings,
    )


def measured(engine: LocalEngine, config: EngineConfig) -> None:
    measure_to_the_end(IdleMeasurement(engine.engine, config, engine.base))


def measure_to_the_end(idle: IdleMeasurement) -> None:
    """Nobody calls meanwhile."""
    until = time.monotonic() + 240
    while not idle.ended and time.monotonic() < until:
        if not idle.work(lambda: False):
            time.sleep(0.005)  # the fit, in its thread, needs the interpreter
    assert idle.ended


def test_an_idle_node_measures_itself_and_keeps_it(known: LocalEngine, tmp_path: Path) -> None:
    profile = tmp_path / "profiles" / "node-1.json"
    assert not use_performance(known.engine, config_of(known, profile), known.base)
    assert known.engine.drift is None and stats_of(known.engine).measuring is None
    blocks, resident = known.engine.blocks.free, known.engine.store.residents()
    measured(known, config_of(known, profile))
    drift = known.engine.drift
    assert drift is not None
    assert drift.measured.decode.rank_term == "adapter_ranks"
    assert drift.measured.decode.seconds(4, 100, 64) == pytest.approx(DECODE.seconds(4, 100, 64), rel=1e-3)
    assert drift.measured.prefill.seconds(100, 10_000, 800) == pytest.approx(
        PREFILL.seconds(100, 10_000, 800), rel=1e-3
    )
    assert drift.measured.from_store == ASSUMED.from_store
    assert (stats_of(known.engine).performance, stats_of(known.engine).measuring) == (drift.published, None)
    assert (known.engine.blocks.free, known.engine.store.residents()) == (blocks, resident)
    file = performance_file(str(profile))
    assert file == tmp_path / "profiles" / "node-1.performance.json"
    stored = read_performance(file, model_key(known.engine, known.base))
    assert not stored.thorough
    assert stored.decode.quality.r2 == pytest.approx(1.0)
    assert use_performance(known.engine, config_of(known, profile), known.base), "the next start finds it"


def test_adapters_that_calls_have_brought_keep_their_weights(
    make_engine: MakeEngine, stories_adapters: dict[str, Path], known_times: Callable[[LocalEngine], None]
) -> None:
    """On a node without a cold-start profile, whose link to the device is measured as well."""
    engine = make_engine(cold_start="wait")
    adapters = [engine.deploy(directory, f"f{n}") for n, directory in enumerate(stories_adapters.values())]
    for adapter in adapters:  # in host memory they lie in another order than on the device
        engine.submit([1, 70], 1, adapter)
        engine.run()
    assert all(engine.engine.store.discard(adapter.digest) for adapter in adapters)
    idle = IdleMeasurement(engine.engine, engine.config, engine.base)
    answers = []
    for _ in range(2):
        calls = [engine.submit([1, 70, 80], 8, adapter) for adapter in reversed(adapters)]
        engine.run()
        answers.append([engine.outcomes[call].tokens for call in calls])
        pool = engine.engine.store.pool
        data, owner = pool.data.clone(), list(pool.pages.owner)
        known_times(engine)
        measure_to_the_end(idle)
        measure_link(engine.engine.store, 1)
        assert engine.engine.drift is not None
        assert pool.pages.owner == owner
        size = pool.page_size // pool.data.element_size()
        for page in (number for number, whose in enumerate(owner) if whose is not None):
            at = slice(page * size, (page + 1) * size)
            assert torch.equal(pool.data[at], data[at]), f"page {page} of an adapter was written"
    assert answers[0] == answers[1]


def test_a_file_of_this_node_is_used(known: LocalEngine, tmp_path: Path) -> None:
    measured(known, config_of(known, tmp_path / "a.json"))
    file = performance_file(str(tmp_path / "a.json"))
    stored = read_performance(file, None)
    other = replace(
        stored, decode=replace(stored.decode, model=replace(DECODE, base=0.5)), from_store=Transfer(0.5, 1e6)
    )
    write_performance(other, file)
    known.engine.drift = None
    link = LinkConfig(bandwidth=1e6, latency=0.25)
    assert use_performance(known.engine, config_of(known, tmp_path / "a.json", store_link=link), known.base)
    drift = known.engine.drift
    assert drift is not None
    assert drift.measured.decode.base == 0.5
    assert drift.measured.from_store == Transfer(0.75, 5e5)


def test_a_model_of_other_products_is_none_of_this_nodes(
    known: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measured(known, config_of(known, tmp_path / "a.json"))
    monkeypatch.setattr(known.engine.runner, "products", Products(False, 12, False, None))
    assert not use_performance(known.engine, config_of(known, tmp_path / "a.json"), known.base)
    assert "bf16 to 12 rows, then fp32')" in str(getattr(caplog.records[-1], "reason", ""))


@pytest.mark.parametrize("damage", ["key", "text", "none"])
def test_what_can_not_be_used_is_told_and_none_is_published(
    engine: LocalEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    file = performance_file(str(tmp_path / "a.json"))
    if damage == "text":
        file.write_text('{"key": ')
    elif damage == "key":
        write_performance(PROFILE, file)
    before = file.read_bytes() if file.exists() else None
    assert not use_performance(engine.engine, config_of(engine, tmp_path / "a.json"), engine.base)
    assert engine.engine.drift is None
    told = [str(getattr(record, "reason", "")) for record in caplog.records]
    assert any("run `garnish profile`" in line for line in told) == (damage != "none")
    assert (file.read_bytes() if file.exists() else None) == before


def test_a_thorough_measurement(
    known: LocalEngine, stories_adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter in the registry, reads from it are measured, too."""
    monkeypatch.setattr(setup, "LONG", dataclasses.replace(setup.LONG, rounds=1, **FEWER))
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


def test_a_model_is_fitted_for_the_engines_kernel_alone(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(setup, "fit_decode", lambda samples, error, terms: tried.append(terms))
    monkeypatch.setattr(setup, "fit_prefill", lambda samples, error: None)
    setup.fit(sweep.Sweep(), "bgmv")
    assert tried == [("max_rank",)]
    key = model_key(engine.engine, engine.base)
    assert key.kernel == "cpu"
    write_performance(replace(PROFILE, key=key), performance_file(str(tmp_path / "a.json")))
    engine.engine.lora_kernel = "bgmv"
    assert not use_performance(engine.engine, config_of(engine, tmp_path / "a.json"), engine.base)
    assert any("kernel" in str(getattr(record, "reason", "")) for record in caplog.records)
    engine.engine.lora_kernel = "cpu"
    assert use_performance(engine.engine, config_of(engine, tmp_path / "a.json"), engine.base)


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
        shares[bandwidth] = exposed_share(profile, MODES["auto"], engine.engine, engine.base)
        assert exposed_share(profile, MODES["wait"], engine.engine, engine.base) == pytest.approx(1.0)
    assert shares[1e12] == pytest.approx(1.0)
    assert 0 < shares[1e8] < 0.4 < shares[1e6] < shares[1e4] <= 1
    assert shares[1e4] > 0.95
