"""An engine that hands over on its device's stream: exact answers whatever fails, copies that the stream awaits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from adapters.base_model import BaseModel
from node_agent.adapter_memory import device_copy
from node_agent.adapter_memory.store import AdapterStore
from node_agent.coldstart import setup, worker_start
from node_agent.coldstart.cold_lora import ColdLora
from node_agent.coldstart.measure import SHORT
from node_agent.coldstart.shared import DTYPES
from node_agent.coldstart.stream import StreamPool
from node_agent.coldstart.workers import WorkerPool
from node_agent.config import EngineConfig
from node_agent.cores import spare_cores
from node_agent.runner import cuda_runner
from node_agent.runner.cuda_pass import CapturedPass, HandoffPass, LayeredPass, PromptPass
from node_agent.runner.cuda_runner import CudaRunner
from node_agent.runner.lora import NoHandoffs
from node_agent.types import PassLora, Plan, StepBatch
from tests.node_agent.coldstart.held_event import HeldEvent
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.coldstart.kept import as_started, pool_of
from tests.node_agent.coldstart.pools import LONG, eventually
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally, check
from tests.support.forced import force
from tests.support.host_kernels import HostKernels
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter
from tests.support.worker_counters import counters_of

CPU = torch.device("cpu")
needs_core = pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")


@pytest.fixture(scope="module")
def stream_pools(soon_again: None) -> Iterator[None]:
    """Engines on the CPU hand over as on a GPU."""

    def make(config: EngineConfig, store: AdapterStore, base: BaseModel, cores: list[int], _: int) -> WorkerPool:
        layout = setup.stream_layout(config, base, len(cores), DTYPES.index(store.pool.data.dtype))
        return StreamPool(store.host_map, layout, cores, CPU, HostKernels(), wait_limit=2.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_start, "make_pool", make)
        yield


Started = tuple[type, type]
"""A pass's kind, and its adapter's"""


class Noting(CudaRunner):
    """Notes the kinds of its passes, and whether they had an adapter."""

    started: ClassVar[list[Started]] = []

    def start(self, batch: StepBatch, lora: PassLora | None) -> CapturedPass | LayeredPass:
        run = super().start(batch, lora)
        self.started.append((type(run), type(lora)))
        return run


@pytest.fixture(scope="module")
def noting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_runner, "CudaRunner", Noting)
        yield


Kept = tuple[LocalEngine, list[Started]]
"""An engine, and what its runner noted until it was there"""
PLAIN = pytest.param(("transformers", 16), id="transformers")
CUDA = pytest.param(("cuda", 4), id="cuda")
"""Few buckets: plain torch takes long for the padded rows of a captured prompt."""
MORE_ROWS = pytest.param(("cuda", 16), id="cuda", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def made_once(
    stories_dir: Path, stream_pools: None, noting: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str, int], Kept]]:
    """By runner and rows."""
    with contextlib.ExitStack() as stack:

        @cache
        def make(runner: str, max_rows: int) -> Kept:
            Noting.started.clear()
            engine = LocalEngine(
                stories_dir, tmp_path_factory.mktemp("kept") / "registry", runner=runner, prefix_cache="auto",
                dtype="float32", threads=1, adapter_memory=2 << 20, host_memory=32 << 20, kv_memory=32 << 20,
                cpu_workers=1, block_tokens=4, chunk_tokens=64, max_rows=max_rows,
            )  # fmt: skip
            stack.enter_context(contextlib.closing(engine))
            return engine, [*Noting.started]

        yield make


@pytest.fixture
def kept(request: pytest.FixtureRequest, made_once: Callable[[str, int], Kept]) -> Kept:
    return made_once(*request.param)


@pytest.fixture
def engine(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    Noting.started.clear()
    with as_started(kept[0], monkeypatch) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(stories_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapts everything, in every layer."""
    out = tmp_path_factory.mktemp("stream") / "whole"
    return make_adapter(stories_dir, out, 3, r=7, lora_alpha=7, target_modules=ALL_TARGETS)


@needs_core
@pytest.mark.parametrize("kept", [PLAIN, CUDA], indirect=True)
@pytest.mark.parametrize("fault", [None, signal.SIGSTOP, signal.SIGKILL])
def test_answers_are_exact(
    engine: LocalEngine,
    reference: PeftReference,
    whole: Path,
    fault: signal.Signals | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every layer of a cold prompt is for the worker. Also where that fails in the midst of the pass: the chunk is
    computed again with the weights."""
    pool, layers = pool_of(engine), engine.base.num_layers
    plan = Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    monkeypatch.setattr(engine.engine.cold_start, "plan", lambda lease, n_tokens, ahead: plan)
    assert isinstance(pool, StreamPool)
    (pid,) = pool.pids()
    written, before, replays = pool.command, counters_of(pool).handoffs, engine.engine.cold.replays

    def fail(at: int, *given: int) -> object:
        if fault is not None and at % pool.layout.steps == 4:
            os.kill(pid, fault)
            monkeypatch.setattr(pool, "wait_ns", 200_000_000)  # enough for nobody who is stopped
        return written(at, *given)

    pool.command = fail  # type: ignore[method-assign, assignment]
    link = HeldLink(engine)
    prompt = [1, *range(50, 90)]
    request = engine.submit(prompt, 6, engine.deploy(whole), ignore_eos=True)
    outcome = engine.outcomes[request]
    engine.run(until=lambda: bool(outcome.tokens) or engine.engine.cold.replays > replays)
    pool.command = written  # type: ignore[method-assign]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    link.open()
    engine.run()
    assert not check(engine, reference, Case(whole, None, prompt, 6), outcome.tokens, Tally())
    assert outcome.finished is not None
    cold = outcome.finished.cold_start
    assert cold.replays == (fault is not None)
    if fault is None:
        assert (cold.layers_cpu, cold.layers_device) == (layers, 0)
        assert counters_of(pool).handoffs == before + 4 * layers
    eventually(lambda: not counters_of(pool).in_quarantine)
    assert pool.wait_ready(LONG) == 1
    if isinstance(engine.engine.runner, Noting):
        assert (HandoffPass, ColdLora) in Noting.started
        assert not any(bucket.in_use for bucket in engine.engine.runner.prompts)
    engine.assert_clean()
    assert not any(host.holds for hosts in engine.engine.store.hosts.owned().values() for host in hosts)


@needs_core
@pytest.mark.parametrize("kept", [CUDA], indirect=True)
@pytest.mark.parametrize("arrived", [3, 4])
def test_layers_that_arrive_meanwhile(
    engine: LocalEngine, reference: PeftReference, whole: Path, arrived: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers of a captured prompt are on the device, and the worker has those that have not come: in one case
    the last of the first stretch of four, too. Another prompt is computed in between."""
    layers = engine.base.num_layers
    link, plan = HeldLink(engine), Plan("assist", 0, 0.0, (1.0,) * layers, (0.0,) * layers)
    monkeypatch.setattr(engine.engine.cold_start, "plan", lambda *_: plan)
    cases = [Case(whole, engine.deploy(whole), [1, *range(50, 70)], 6), Case(None, None, [1, *range(100, 120)], 3)]
    requests = [engine.submit(cases[0].prompt, cases[0].max_tokens, cases[0].adapter, ignore_eos=True)]
    link.let(arrived)
    cold = engine.engine.cold
    engine.run(until=lambda: bool(cold.open) and cold.open[0].run.layer == arrived)
    requests.append(engine.submit(cases[1].prompt, cases[1].max_tokens, ignore_eos=True))
    engine.run(until=lambda: engine.outcomes[requests[1]].finished is not None)
    cold.open[0].plan = replace(plan, assisted=layers)
    engine.run(until=lambda: bool(engine.outcomes[requests[0]].tokens))
    link.open()
    engine.run()
    for case, each in zip(cases, requests, strict=True):
        assert not check(engine, reference, case, engine.outcomes[each].tokens, Tally())
    finished = engine.outcomes[requests[0]].finished
    assert finished is not None
    found = finished.cold_start
    assert (found.layers_device, found.layers_cpu, found.replays) == (arrived, layers - arrived, 0)
    assert (HandoffPass, ColdLora) in Noting.started


@needs_core
@pytest.mark.parametrize("kept", [CUDA], indirect=True)
def test_a_profile_is_of_passes_as_they_will_run(kept: Kept, make_engine: MakeEngine) -> None:
    """With workers on the stream a layer is measured in the pieces between handoffs, without them in stretches; for a
    prompt longer than a chunk, of which nothing is captured, kernel by kernel."""
    Noting.started.clear()
    without = make_engine(cpu_workers=0, runner="cuda", max_rows=4, chunk_tokens=64)
    for (made, started), kind in (
        (kept, (HandoffPass, NoHandoffs)), ((without, Noting.started), (PromptPass, type(None)))
    ):  # fmt: skip
        profile = made.engine.cold_start.profile
        assert profile is not None and len(profile.layer) == 3
        measured = started[-len(profile.layer) * (SHORT.rounds + 1) :]
        assert measured == [kind] * 2 * (SHORT.rounds + 1) + [(LayeredPass, kind[1])] * (SHORT.rounds + 1)


@needs_core
@pytest.mark.parametrize("kept", [PLAIN, MORE_ROWS], indirect=True)
def test_drawn_plans_arrivals_and_faults(
    engine: LocalEngine, reference: PeftReference, drawn_adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.engine.cold, "cold_start", engine.engine.cold_start)  # what is forced ends with the test
    forced = force(engine.engine, random.Random(8), faults=0.05)
    rng, tally, seen = random.Random(7), Tally(), Counter[str]()
    kinds = [Case(None, None, [], 0), *(Case(path, engine.deploy(path), [], 0) for path in drawn_adapters)]
    problems: list[str] = []
    while tally.cases < 16:
        problems += run_batch(rng, engine, reference, kinds, tally, seen)
    assert not problems, "\n".join(problems)
    assert forced.plans["assist"] and seen["layers_cpu"] and seen["layers_device"]


def test_layers_are_used_when_their_copies_are_enqueued(
    make_engine: MakeEngine, reference: PeftReference, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream waits for them, the host does not; the adapter is there when its last copy has ended."""
    awaited: list[int] = []
    events: list[HeldEvent] = []

    class Awaited(HeldEvent):
        def wait(self) -> None:
            awaited.append(events.index(self))

    def record(_: torch.device) -> HeldEvent:
        events.append(Awaited())
        return events[-1]

    engine = make_engine(cold_start="pipeline", cpu_workers=0)
    adapter = engine.deploy(whole)
    engine.submit([1], 1, adapter)
    engine.run()
    while not engine.engine.store.discard(adapter.digest):  # from here on it lies in host memory, wholly
        engine.step()
    monkeypatch.setattr(device_copy, "record_event", record)
    monkeypatch.setattr(device_copy, "PORTION_BYTES", 0)  # each layer by itself
    engine.engine.cold_start.plan = lambda lease, n_tokens, ahead: Plan("pipeline")  # type: ignore[method-assign]
    request = engine.submit([1, *range(50, 90)], 6, adapter, ignore_eos=True)
    enqueued = device_copy.AHEAD + 1
    passes = engine.engine.cold
    engine.run(until=lambda: bool(passes.open) and passes.open[0].run.layer == enqueued)
    assert awaited == list(range(enqueued))
    for _ in range(20):
        engine.step()
    assert passes.open[0].run.layer == enqueued, "nothing else is enqueued yet"
    release_all(events, lambda: engine.outcomes[request].finished is not None, engine)
    assert not check(
        engine, reference, Case(whole, None, [1, *range(50, 90)], 6), engine.outcomes[request].tokens, Tally()
    )
    engine.assert_clean()


def release_all(events: list[HeldEvent], done: Callable[[], bool], engine: LocalEngine) -> None:
    def step() -> bool:
        for event in events:
            event.over = True
        engine.step()
        return done()

    eventually(step)
