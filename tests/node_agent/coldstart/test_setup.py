"""What a node starts its cold starts with: whatever its profile's file is or says, it serves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node_agent.coldstart import measure, worker_start
from node_agent.coldstart.cold_starts import MODES, ColdStarts
from node_agent.coldstart.pass_times import PassSample, kind_of
from node_agent.coldstart.planner import PLANS, Contention
from node_agent.coldstart.profile import CpuLora, LinkCost, Profile, ProfileError, ProfileKey, read_profile
from node_agent.coldstart.profile import check as check_profile
from node_agent.coldstart.setup import profile_key
from node_agent.config import EngineConfig, LinkConfig
from node_agent.cores import spare_cores, usable_cores
from node_agent.device import device_name
from node_agent.leases import Lease
from tests.node_agent.adapter_world import World, lease
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter

PROMPT = [1, *range(50, 57)]
needs_core = pytest.mark.skipif(not spare_cores(1), reason="NOT RUN: a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def directory(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("setup") / "whole"
    return make_adapter(stories_dir, out, 3, r=7, lora_alpha=7, target_modules=ALL_TARGETS)


def assert_serves(engine: LocalEngine, reference: PeftReference, directory: Path) -> None:
    request = engine.submit(PROMPT, 3, engine.deploy(directory), ignore_eos=True)
    engine.run()
    case = Case(directory, None, PROMPT, 3)
    assert not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


def test_a_profile_that_can_not_be_written_keeps_no_node_from_serving(
    make_engine: MakeEngine, reference: PeftReference, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    engine = make_engine(cpu_workers=0, profile=str(tmp_path / "file" / "profile.json"))
    assert engine.engine.cold_start.profile is not None
    assert_serves(engine, reference, directory)


def test_a_cache_of_fewer_tokens_than_are_measured(
    make_engine: MakeEngine, reference: PeftReference, directory: Path
) -> None:
    engine = make_engine(cpu_workers=0, cold_start="pipeline", block_tokens=4, kv_memory=4 * 4 * 1280)
    assert engine.engine.limits.max_context == 12
    profile = engine.engine.cold_start.profile
    assert profile is not None and [tokens for tokens, _ in profile.layer] == [12]
    assert_serves(engine, reference, directory)


@needs_core
def test_workers_that_did_not_answer_once_are_asked_again_at_the_next_start(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cores = tmp_path / "profile.json", os.sched_getaffinity(0)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "_slice_seconds", lambda *_: None)
        engine = make_engine(cpu_workers=1, profile=str(file))
    assert engine.engine.assist is None and engine.engine.cold_start.decision.count == 0
    assert os.sched_getaffinity(0) == cores
    engine = make_engine(cpu_workers=1, profile=str(file))
    assert engine.engine.assist is not None
    found = msgspec.json.decode(file.read_bytes(), type=Profile)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, cpu=None)))
    with pytest.raises(ProfileError, match="workers answered while"):
        read_profile(file, found.key)


@needs_core
def test_the_engine_has_all_cores_but_while_workers_are_armed(stories_dir: Path, tmp_path: Path) -> None:
    cores, before, fewer = os.sched_getaffinity(0), torch.get_num_threads(), min(2, usable_cores() - 1)
    try:
        with closing(
            LocalEngine(
                stories_dir, tmp_path / "registry", dtype="float32", threads=2, cpu_workers=1,
                adapter_memory=1 << 20, host_memory=4 << 20, kv_memory=4 << 20,
            )
        ) as engine:  # fmt: skip
            assert engine.engine.assist is not None
            workers = engine.engine.assist.workers
            for _ in range(2):
                assert torch.get_num_threads() == 2 and all(found == cores for found in affinities())
                workers.arm()
                workers.arm()
                assert torch.get_num_threads() == fewer
                assert len(os.sched_getaffinity(0)) == len(cores) - 1
                workers.disarm()
                assert len(os.sched_getaffinity(0)) == len(cores) - 1, "another pass still needs them"
                workers.disarm()
        assert torch.get_num_threads() == 2 and os.sched_getaffinity(0) == cores
    finally:
        torch.set_num_threads(before)


@needs_core
def test_workers_are_on_the_cores_behind_those_nearest_the_gpu(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[list[int]]()

    def make_pool(*given: object) -> None:
        found.append(list(given[3]))  # type: ignore[call-overload]
        raise ValueError("seen enough")

    monkeypatch.setattr(worker_start, "home_node", lambda gpu, allowed: 5)
    monkeypatch.setattr(worker_start, "nearest_first", lambda allowed, node: sorted(allowed, reverse=node == 5))
    monkeypatch.setattr(worker_start, "make_pool", make_pool)
    with pytest.raises(ValueError, match="seen enough"):
        make_engine(cpu_workers=1)
    assert found == [[sorted(os.sched_getaffinity(0))[-2]]]


def test_no_worker_has_a_core_of_its_own_where_nodes_share_them(make_engine: MakeEngine) -> None:
    link = LinkConfig(bandwidth=1e8)
    assert make_engine(load_link=link, host_nodes=2).engine.assist is None
    with pytest.raises(ValueError, match="cpu_workers: 2 nodes share this host's cores; set 0 or auto"):
        make_engine(load_link=link, cpu_workers=1, host_nodes=2)
    make_engine(load_link=link, cpu_workers=0, host_nodes=2)


def affinities() -> list[set[int]]:
    """Of this process's threads."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found.append(os.sched_getaffinity(int(task)))
    return found


def test_a_profile_is_of_this_processor(make_engine: MakeEngine) -> None:
    engine = make_engine(cpu_workers=0)
    config = EngineConfig(model_dir="", base_id="", registry="")
    key = profile_key(engine.engine, config, engine.base)
    assert key.device == device_name(engine.engine.runner.device)
    assert key.device in Path("/proc/cpuinfo").read_text()


@pytest.fixture(scope="module")
def held(world: World) -> Iterator[tuple[ColdStarts, Lease]]:
    """An adapter of which nothing crosses the link."""
    store = world.store()
    store.loader.copying.close(wait=True)
    yield ColdStarts(store, world.base, MODES["auto"]), lease(store, world.adapters[0])
    store.close()


class OneWorker:
    usable = 1
    engine_cores = None


NUMBERS = st.one_of(
    st.floats(0, 1e3), st.sampled_from([0.0, 5e-324, 1e-308, 1.0, 999.0, 1e308, float("inf"), float("nan"), -1.0])
)


@given(
    layer=st.dictionaries(st.integers(1, 1 << 20), NUMBERS, min_size=1, max_size=3),
    cpu=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    link=st.tuples(NUMBERS, NUMBERS),
    tokens=st.integers(1, 1 << 13),
    ahead=st.sampled_from([0.0, 1e-9, 1e6]),
    others=st.sampled_from([0, 1, 100]),
    decodes=st.sampled_from([0, 1, 12]),
    passes_s=st.lists(NUMBERS, max_size=4),
)
def test_every_profile_that_is_accepted_makes_a_plan(
    held: tuple[ColdStarts, Lease],
    layer: dict[int, float],
    cpu: tuple[float, float, float],
    link: tuple[float, float],
    tokens: int,
    ahead: float,
    others: int,
    decodes: int,
    passes_s: list[float],
) -> None:
    """Its file can say anything; a plan that can't be made would end the engine."""
    starts, found = held
    key = ProfileKey("", "float32", "cpu", 1, 1)
    kind = kind_of(starts.store.layout(found), tokens)
    passes = tuple(PassSample(kind, name, seconds, 0.1) for name in PLANS for seconds in passes_s)
    profile = Profile(key, tuple(sorted(layer.items())), CpuLora(*cpu), LinkCost(*link), passes=passes)
    try:
        check_profile(profile)
    except ProfileError:
        return
    starts.use(profile, OneWorker())  # type: ignore[arg-type]
    plan = starts.plan(found, tokens, Contention(ahead, others, decodes=decodes))
    assert plan.name in starts.mode.plans and plan.exposed >= 0
    assert 0 <= starts.ready_until(found, plan, 0) <= starts.base.num_layers
