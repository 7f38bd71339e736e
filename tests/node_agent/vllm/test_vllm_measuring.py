"""The measurement of a node with vLLM: what it finds, that calls go first, and that it leaves nothing."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from safetensors.torch import load_file

from adapters.base_model import BaseModel, load_base_model
from cluster.messages import GenerateRequest, Sampling
from cluster.performance_file import read_performance
from cluster.performance_fit import TransferSample
from node_agent.config import EngineConfig
from node_agent.ipc import Finished, Generated
from node_agent.vllm.engine import VllmDied
from node_agent.vllm.measuring import bench as bench_module
from node_agent.vllm.measuring import idle as idle_module
from node_agent.vllm.measuring import thorough
from node_agent.vllm.measuring.cases import GrowingBatch, Room, growing_batches, prompt_passes
from node_agent.vllm.measuring.dummies import DummyFolders
from node_agent.vllm.measuring.idle import IDLE, VllmIdleMeasurement, seconds_of_children
from node_agent.vllm.measuring.samples import fit_loads
from node_agent.vllm.measuring.setup import Conditions, use_performance
from tests.node_agent.vllm.folder_world import put_adapter
from tests.node_agent.vllm.stepping_vllm import DECODE, MAX_RANK, PREFILL, SECONDS, SteppingWorld

ROOM = Room(16, 512, 256, 1024, 16, 4, MAX_RANK, caches_prefixes=True)
FEW = replace(IDLE, rows=(1, 2, 4, 8), ranks=(8, 32), tokens=(8, 16, 32, 48, 64, 96, 128), rounds=1, cache=1024)


@pytest.fixture
def base(stories_dir: Path) -> BaseModel:
    return load_base_model(stories_dir)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppingWorld]:
    monkeypatch.setattr(idle_module, "IDLE", FEW)
    made = SteppingWorld(tmp_path)
    with closing(made):
        yield made


def measurement(world: SteppingWorld, base: BaseModel, folder: Path, **arguments: Any) -> VllmIdleMeasurement:
    return VllmIdleMeasurement(world.engine, config_of(folder), conditions_of(base, **arguments))


def conditions_of(base: BaseModel, **arguments: Any) -> Conditions:
    return Conditions(base, "float32", "", "0.32.0", {"max_lora_rank": MAX_RANK} | arguments, "1.0")


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model_dir="", base_id="stories", registry="", profile=str(folder / "profiles" / "node.json"))


def measure_to_the_end(idle: VllmIdleMeasurement) -> None:
    until = time.monotonic() + 4 * SECONDS
    while not idle.ended:
        assert time.monotonic() < until
        if not idle.work(lambda: False):
            time.sleep(0.005)  # the fit, in its thread, needs the interpreter


def test_it_finds_the_costs_of_a_kernel_that_pads(world: SteppingWorld, base: BaseModel, tmp_path: Path) -> None:
    assert not use_performance(world.engine, config_of(tmp_path), conditions_of(base))
    measure_to_the_end(measurement(world, base, tmp_path))
    drift = world.engine.drift
    assert drift is not None and world.engine.measuring is None
    found = drift.measured
    assert (found.decode.rank_term, found.decode.padded_rank) == ("request_ranks", MAX_RANK)
    assert found.decode.seconds(4, 200, 3 * MAX_RANK) == pytest.approx(DECODE.seconds(4, 200, 3 * MAX_RANK), rel=0.01)
    assert found.prefill.padded_rank == MAX_RANK
    prompt = (100, 10_000, 100 * MAX_RANK)
    assert found.prefill.seconds(*prompt) == pytest.approx(PREFILL.seconds(*prompt), rel=0.01)
    assert (found.exposed_share, found.key.kernel) == (1.0, "vllm")
    assert read_performance(tmp_path / "profiles" / "node.performance.json", found.key).model == found


def test_a_kernel_that_does_not_pad_counts_own_ranks(
    tmp_path: Path, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_module, "IDLE", FEW)
    own = structs.replace(DECODE, padded_rank=0), structs.replace(PREFILL, padded_rank=0)
    with closing(SteppingWorld(tmp_path, decode=own[0], prefill=own[1])) as world:
        measure_to_the_end(measurement(world, base, tmp_path))
        drift = world.engine.drift
    assert drift is not None
    assert (drift.measured.decode.padded_rank, drift.measured.prefill.padded_rank) == (0, 0)
    assert drift.measured.decode.seconds(8, 300, 100) == pytest.approx(own[0].seconds(8, 300, 100), rel=0.01)


def test_a_thorough_measurement(
    world: SteppingWorld, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads from the store, too, and leaves nothing."""
    monkeypatch.setattr(thorough, "LONG", FEW)
    put_adapter(world.objects, 1, size=1 << 22)
    config = EngineConfig(model_dir="", base_id="stories", registry=str(tmp_path / "registry"))
    shares = list[float]()
    found = thorough.measure_performance(
        world.engine, config, conditions_of(base), lambda _, share: shares.append(share)
    )
    assert found.thorough and found.from_store is not None and found.from_store.bandwidth > 1e6
    assert found.decode.model.padded_rank == MAX_RANK and found.decode.quality.r2 > 0.99
    assert shares[0] == 0.0 and max(shares) > 0.9
    assert not list(world.engine.store.hosts.root.iterdir())


def test_nothing_of_it_stays(world: SteppingWorld, base: BaseModel, tmp_path: Path) -> None:
    idle = measurement(world, base, tmp_path)
    assert idle.work(lambda: False) and world.engine.measuring
    root = world.engine.store.hosts.root
    assert list(root.glob("dummy-*")), "the files stay until all is measured"
    measure_to_the_end(idle)
    world.driver.request_reports()
    world.changed.wait(SECONDS)
    assert not list(root.iterdir())
    deadline = time.monotonic() + SECONDS
    while world.vllm.ranks or world.vllm.running or world.vllm.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert world.engine.store.free_slots(0) == 4 and not world.engine.store.residents()


def test_a_call_ends_the_dummies_and_is_computed(world: SteppingWorld, base: BaseModel, tmp_path: Path) -> None:
    idle, adapter = measurement(world, base, tmp_path), put_adapter(world.objects, 1)
    for after in (1, 4, 9):
        asked = list[int]()

        def comes(asked: list[int] = asked, after: int = after) -> bool:
            asked.append(world.vllm.steps)
            return len(asked) > after and bool(world.vllm.running)

        while not (asked and world.vllm.running):
            idle.work(comes)
            if len(asked) > after:
                break
        world.engine.submit(
            GenerateRequest(f"call-{after}", "", "v", [1, 2], 3, Sampling(0.0), SECONDS, adapter, ignore_eos=True)
        )
        world.run()
        events = world.engine.take_events()
        assert [type(e) for e in events if isinstance(e, Generated | Finished)] == [*[Generated] * 3, Finished]
        assert len(world.vllm.ranks) == 1, "the caller's adapter alone"
    measure_to_the_end(idle)
    assert world.engine.drift is not None
    assert [resident.tier for resident in world.engine.store.residents()] == ["device"]


def test_callers_adapters_leave_their_slots_only_where_too_few_are_free(
    world: SteppingWorld, base: BaseModel, tmp_path: Path
) -> None:
    adapters = [put_adapter(world.objects, seed) for seed in range(4)]
    for at, adapter in enumerate(adapters):
        world.engine.submit(
            GenerateRequest(f"call-{at}", "", "v", [1, 2], 1, Sampling(0.0), SECONDS, adapter, ignore_eos=True)
        )
        world.run()
    measurement(world, base, tmp_path).work(lambda: False)
    tiers = {resident.digest: resident.tier for resident in world.engine.store.residents()}
    assert tiers == dict(
        zip([adapter.digest for adapter in adapters], ["host", "host", "device", "device"], strict=True)
    )


def test_it_waits_while_all_adapters_must_stay(world: SteppingWorld, base: BaseModel, tmp_path: Path) -> None:
    adapters = [put_adapter(world.objects, seed) for seed in range(4)]
    for at, adapter in enumerate(adapters):
        world.engine.submit(
            GenerateRequest(f"call-{at}", "", "v", [1, 2], 1, Sampling(0.0), SECONDS, adapter, ignore_eos=True)
        )
        world.run()
    world.engine.store.pin([adapter.digest for adapter in adapters])
    idle, steps = measurement(world, base, tmp_path), world.vllm.steps
    assert idle.work(lambda: False) and not idle.work(lambda: False)
    assert (world.vllm.steps, len(world.vllm.ranks)) == (steps, 4)


def test_a_vllm_that_stands_still_is_dead(
    world: SteppingWorld, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.engine.answer_s = 0.2
    world.vllm.still.set()
    with pytest.raises(VllmDied, match="has not answered a measurement"):
        measurement(world, base, tmp_path).work(lambda: False)


def test_a_restart_reads_what_was_measured(world: SteppingWorld, base: BaseModel, tmp_path: Path) -> None:
    measure_to_the_end(measurement(world, base, tmp_path))
    assert world.engine.drift is not None
    found, world.engine.drift = world.engine.drift.measured, None
    assert use_performance(world.engine, config_of(tmp_path), conditions_of(base))
    assert world.engine.drift is not None and world.engine.drift.measured == found  # type: ignore[unreachable]


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"vllm": "0.33.0"}, "vLLM 0.33.0"), ({"device": "H200"}, "H200"), ({"dtype": "float16"}, "")],
)
def test_other_conditions_are_measured_anew(
    world: SteppingWorld, base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: Any, named: str
) -> None:
    measure_to_the_end(measurement(world, base, tmp_path))
    world.engine.drift = None
    with caplog.at_level(logging.WARNING):
        assert not use_performance(world.engine, config_of(tmp_path), replace(conditions_of(base), **changed))
    assert named in getattr(caplog.records[-1], "reason", "")
    assert not use_performance(world.engine, config_of(tmp_path), conditions_of(base, quantization="fp8"))


def test_dummies_are_adapters_that_peft_reads(base: BaseModel, tmp_path: Path) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        (tmp_path / dtype).mkdir()
        folders = DummyFolders(tmp_path / dtype, base, dtype)
        folder = folders.folder(8)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["target_modules"] == ["k_proj", "q_proj", "v_proj"] and config["r"] == 8
        tensors = load_file(folder / "adapter_model.safetensors")
        assert len(tensors) == 2 * 3 * base.num_layers
        assert sum(each.numel() * each.element_size() for each in tensors.values()) == folders.size(8)
        for tensor in tensors.values():
            assert str(tensor.dtype) == f"torch.{dtype}" and 0 < tensor.abs().max() < 0.01
        folders.remove()
        assert not list((tmp_path / dtype).iterdir())


@pytest.mark.parametrize("slots", [0, 1, 2, 4])
@pytest.mark.parametrize("blocks", [3, 40, 1024])
def test_cases_fit_in_the_room(slots: int, blocks: int) -> None:
    room = replace(ROOM, slots=slots, kv_blocks=blocks)
    batches = growing_batches(IDLE, room)
    for batch in batches:
        assert len(batch.adapters) <= slots and batch.sizes[-1] == len(batch.rows) <= room.max_rows
        tokens = bench_module.SPARE_TOKENS * len(IDLE.rows)
        used = sum(-(-(row.length + tokens) // room.block_tokens) for row in batch.rows)
        assert used <= blocks
        assert all(row.length + tokens <= room.max_context for row in batch.rows)
    if blocks == 1024:
        seen = {frozenset(adapter.rank for adapter in batch.adapters) for batch in batches}
        assert (frozenset({MAX_RANK}) in seen) is (slots > 0)
        assert max((len(batch.adapters) for batch in batches), default=0) == slots
    for case in prompt_passes(IDLE, room):
        assert len(case.adapters) <= slots
        assert sum(row.length for row in case.rows) <= room.chunk_tokens
        assert all(row.context % room.block_tokens == 0 for row in case.rows)


def test_a_batch_grows_by_whole_prefixes() -> None:
    batch = growing_batches(FEW, ROOM)[1]
    assert isinstance(batch, GrowingBatch) and batch.sizes == (1, 2, 4, 8)


def test_loads_that_do_not_grow_with_the_size_are_a_latency() -> None:
    growing = fit_loads([TransferSample(size, 0.01 + size * 1e-9) for size in (1 << 20, 1 << 22, 1 << 24)])
    assert growing.seconds(1 << 23) == pytest.approx(0.01 + (1 << 23) * 1e-9, rel=1e-3)
    flat = fit_loads([TransferSample(1 << 20, 0.03), TransferSample(1 << 20, 0.05), TransferSample(1 << 20, 0.04)])
    assert flat.latency == 0.04


def test_forecasts_follow_the_times_of_calls(world: SteppingWorld, base: BaseModel, tmp_path: Path) -> None:
    """Without calls there is nothing to compare; then vLLM becomes slower by a fifth."""
    measure_to_the_end(measurement(world, base, tmp_path))
    drift = world.engine.drift
    assert drift is not None and drift.forecast_ratio is None
    adapter = put_adapter(world.objects, 1)

    def call() -> None:
        for name in "abc":
            world.engine.submit(
                GenerateRequest(name, "", "v", [1] * 9, 40, Sampling(0.0), SECONDS, adapter, ignore_eos=True)
            )
        world.run()

    call()
    assert drift.forecast_ratio == pytest.approx(1.0, abs=0.02)
    for name in ("base", "per_row", "per_context", "per_rank"):
        world.vllm.decode = structs.replace(world.vllm.decode, **{name: getattr(DECODE, name) * 1.2})
    for _ in range(5):
        call()
    assert drift.published.decode.base == pytest.approx(DECODE.base * 1.2, rel=0.03)
    assert drift.published.decode.padded_rank == MAX_RANK
    assert drift.published.prefill == drift.measured.prefill, "no prompt was alone"
    assert drift.forecast_ratio == pytest.approx(1.0, abs=0.05)


def test_a_prompt_alone_is_compared(world: SteppingWorld, base: BaseModel, tmp_path: Path) -> None:
    measure_to_the_end(measurement(world, base, tmp_path))
    drift = world.engine.drift
    assert drift is not None
    world.vllm.prefill = structs.replace(PREFILL, base=PREFILL.base * 3)
    for at in range(40):
        world.engine.submit(GenerateRequest(f"call-{at}", "", "v", [1] * 9, 1, Sampling(0.0), SECONDS, ignore_eos=True))
        world.run()
    assert drift.published.prefill.base > 1.05 * PREFILL.base


def test_the_time_of_living_children_counts() -> None:
    assert seconds_of_children(1) > 0
