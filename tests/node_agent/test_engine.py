"""The engine's book-keeping: how requests end and what they free, limits, deadlines, faults, unharmed neighbours."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.messages import Adapter, GenerateRequest, Sampling
from node_agent.coldstart.cold_starts import ColdStartMode
from node_agent.engine.rows import Row
from node_agent.engine.stats import stats_of
from node_agent.ipc import Finished
from node_agent.types import Plan
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import GREEDY, LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference, make_adapter

STORY = [1, 403, 407, 261]


def ended(engine: LocalEngine, request: str) -> Finished:
    finished = engine.outcomes[request].finished
    assert finished is not None
    return finished


@pytest.fixture
def adapter_dir(drawn_adapters: list[Path]) -> Path:
    """The largest."""
    return max(drawn_adapters, key=lambda path: (path / "adapter_model.safetensors").stat().st_size)


class Gate:
    """A link that carries nothing until it is opened: forced timings instead of slow ones."""

    def __init__(self, engine: LocalEngine) -> None:
        self._open = threading.Event()
        engine.engine.store.loader.device_link = self  # type: ignore[assignment]

    def carry(self, _: int) -> None:
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "type_", "says"),
    [
        ([], 4, "validation_failed", "at least one prompt token"),
        (STORY, 0, "validation_failed", "max_tokens"),
        ([1] * 500, 13, "validation_failed", "exceed the context of 512"),
        ([1, 512], 4, "validation_failed", "outside the vocabulary of 512"),
        ([1, -1], 4, "validation_failed", "outside the vocabulary"),
    ],
)
def test_bad_requests_end_at_once(
    make_engine: MakeEngine, tokens: list[int], max_tokens: int, type_: str, says: str
) -> None:
    engine = make_engine()
    bad, good = engine.submit(tokens, max_tokens), engine.submit(STORY, 3)
    engine.run()
    assert (ended(engine, bad).reason, ended(engine, bad).error_type) == ("error", type_)
    assert says in ended(engine, bad).error
    assert len(engine.outcomes[good].tokens) == 3


def test_the_whole_context_is_served_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.submit([1, *range(3, 510)], 4, ignore_eos=True)
    engine.run()
    assert len(engine.outcomes[request].tokens) == 4
    assert ended(engine, request).reason == "length"


def test_a_request_larger_than_the_cache_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_memory=2 * 5 * 4 * 8 * 4 * 16 * 5)  # 4 usable blocks of 16 tokens
    assert engine.engine.limits.max_context == 64
    request = engine.submit(STORY, 100)
    engine.run()
    assert ended(engine, request).error_type == "validation_failed"


def test_full_queue_answers_overloaded(make_engine: MakeEngine) -> None:
    engine = make_engine(queue_limit=2, max_rows=1)
    requests = [engine.submit(STORY, 3) for _ in range(4)]
    engine.run()
    assert [ended(engine, r).error_type for r in requests] == ["", "", "overloaded", "overloaded"]


def test_two_requests_of_one_id(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.submit(STORY, 5)
    engine.engine.submit(GenerateRequest(first, "", "test", STORY, 5, GREEDY, 10.0))
    events = engine.engine.take_events()
    assert [e.error_type for e in events if isinstance(e, Finished)] == ["conflict"]
    engine.run()
    assert len(engine.outcomes[first].tokens) == 5


def test_cancel_in_every_state(make_engine: MakeEngine, adapter_dir: Path) -> None:
    """Queued, in an open cold pass, prefilling in chunks, decoding, ended, unknown."""
    engine = make_engine(max_rows=2, chunk_tokens=8)
    engine.engine.cold_start.mode = ColdStartMode(("pipeline",))
    gate = Gate(engine)
    adapter = engine.deploy(adapter_dir)
    decoding = engine.submit(STORY, 200, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[decoding].tokens) > 3)
    cold = engine.submit([1, *range(50, 90)], 20, adapter)
    engine.run(until=lambda: bool(engine.engine.cold.open))
    queued = engine.submit(STORY, 5)
    assert engine.engine.queue
    for request in (queued, cold, decoding, "nobody"):
        engine.engine.cancel(request)
    gate.open()
    engine.run()
    engine.step()
    assert [ended(engine, r).reason for r in (queued, cold, decoding)] == ["cancelled"] * 3
    chunked = engine.submit([1, *range(50, 90)], 20)
    engine.step()
    engine.engine.cancel(chunked)
    engine.step()
    assert ended(engine, chunked).reason == "cancelled"
    engine.engine.cancel(chunked)
    assert not engine.engine.take_events()


def test_deadlines(make_engine: MakeEngine, adapter_dir: Path) -> None:
    """In the queue: unavailable; before the first token: timeout; after it: the text so far."""
    engine = make_engine(max_rows=2)
    gate = Gate(engine)
    adapter = engine.deploy(adapter_dir)
    never_loaded = engine.submit(STORY, 5, adapter, timeout=0.3)
    writing = engine.submit(STORY, 500, timeout=0.3, ignore_eos=True)
    engine.run(until=lambda: len(engine.engine.running) == 2)
    queued = engine.submit(STORY, 5, timeout=0.0)
    engine.run(limit=60)
    gate.open()
    assert (ended(engine, queued).reason, ended(engine, queued).error_type) == ("error", "unavailable")
    assert (ended(engine, never_loaded).reason, ended(engine, never_loaded).error_type) == ("error", "timeout")
    assert ended(engine, writing).reason == "timeout"
    assert engine.outcomes[writing].tokens


def test_a_load_never_holds_up_others(make_engine: MakeEngine, adapter_dir: Path) -> None:
    """While one adapter takes its time, base requests start, finish and start again."""
    engine = make_engine(max_cold=1, cold_start="wait")
    gate = Gate(engine)
    adapter = engine.deploy(adapter_dir)
    slow = engine.submit(STORY, 2, adapter)
    engine.run(until=lambda: slow in engine.engine.running)
    for _ in range(3):
        quick = engine.submit(STORY, 4)
        engine.run(until=lambda quick=quick: engine.outcomes[quick].finished is not None)
        assert engine.outcomes[slow].finished is None
    gate.open()
    engine.run()
    finished = ended(engine, slow)
    assert finished.cold_start.state == "absent"
    assert finished.cold_start.plan == "wait"
    assert 0 < finished.cold_start.exposed <= finished.prefill
    again = engine.submit(STORY, 2, adapter)
    engine.run()
    assert ended(engine, again).cold_start.state == "none"


def test_prompts_that_wait_for_their_adapters_are_computed_together(
    make_engine: MakeEngine, drawn_adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass, with the row that decodes beside them."""
    engine = make_engine(cold_start="wait", prefix_cache="off")
    gate, passes = Gate(engine), list[list[str]]()
    compute = engine.engine.hot.compute

    def noting(rows: list[Row], *rest: Any) -> Any:
        passes.append([row.request.id for row in rows if row.length > 1])
        return compute(rows, *rest)

    monkeypatch.setattr(engine.engine.hot, "compute", noting)
    decoding = engine.submit(STORY, 200, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[decoding].tokens) > 3)
    cold = [engine.submit(STORY, 2, engine.deploy(path)) for path in drawn_adapters[:3]]
    engine.run(until=lambda: all(request in engine.engine.running for request in cold))
    passes.clear()
    gate.open()
    leases = [engine.engine.running[request].lease for request in cold]
    deadline = time.monotonic() + 60
    while not all(lease is not None and engine.engine.store.loaded(lease) for lease in leases):
        assert time.monotonic() < deadline
        engine.engine.store.poll()
    engine.run()
    assert [sorted(prompts) for prompts in passes if prompts] == [sorted(cold)]
    assert not any(ended(engine, request).cold_start.layers_device for request in cold)


class Turnstile:
    """Lets one layer at a time through to the device."""

    def __init__(self, engine: LocalEngine) -> None:
        self._permits = threading.Semaphore(0)
        engine.engine.store.loader.device_link = self  # type: ignore[assignment]

    def carry(self, size: int) -> None:
        assert self._permits.acquire(timeout=60)

    def let(self, layers: int) -> None:
        self._permits.release(layers)


def test_others_decode_between_the_layers_of_a_cold_pass(
    make_engine: MakeEngine, adapter_dir: Path, reference: PeftReference
) -> None:
    """It goes on with each layer that comes, and waits for none with others' decodes to do; its answer is PEFT's."""
    engine = make_engine(chunk_tokens=16)
    adapter, prompt = engine.deploy(adapter_dir), [1, *range(100, 150)]
    engine.submit([1], 1, adapter)
    engine.run()
    while not engine.engine.store.discard(adapter.digest):  # from here on it lies in host memory: layers go in order
        engine.step()
    turnstile, passes = Turnstile(engine), engine.engine.cold.open
    engine.engine.cold_start.plan = lambda lease, n_tokens, ahead: Plan("pipeline")  # type: ignore[method-assign]
    cold = engine.submit(prompt, 8, adapter)
    engine.run(until=lambda: bool(passes))
    for layer in range(1, engine.base.num_layers):
        turnstile.let(1)
        engine.run(until=lambda layer=layer: passes[0].run.layer == layer)
        writing = engine.submit(STORY, 3, ignore_eos=True)
        engine.run(until=lambda writing=writing: engine.outcomes[writing].finished is not None)
        assert len(engine.outcomes[writing].tokens) == 3
        assert passes[0].run.layer == layer
    turnstile.let(1)
    engine.run()
    assert not check(engine, reference, Case(adapter_dir, adapter, prompt, 8), engine.outcomes[cold].tokens, Tally())


def test_a_broken_adapter_fails_its_request_alone(make_engine: MakeEngine, adapter_dir: Path) -> None:
    engine = make_engine()
    adapter = engine.deploy(adapter_dir)
    blob = bytearray(engine.registry.store.get(adapter.artifact).data)
    blob[-1] ^= 255
    broken_key = "artifacts/v1/broken/copy"
    engine.registry.store.put_if_absent(broken_key, bytes(blob))
    bad = engine.submit(STORY, 4, Adapter(adapter.digest, broken_key, adapter.bytes, adapter.ranks))
    base = engine.submit(STORY, 4)
    engine.run()
    assert ended(engine, bad).error_type == "unavailable"
    assert broken_key not in ended(engine, bad).error
    assert len(engine.outcomes[base].tokens) == 4
    engine.engine.store.hosts.failure_memory = 0.0
    engine.step()
    good = engine.submit(STORY, 4, adapter)
    engine.run()
    assert len(engine.outcomes[good].tokens) == 4


def test_non_finite_numbers_stay_in_their_row(
    make_engine: MakeEngine, stories_dir: Path, tmp_path: Path, reference: PeftReference, adapter_dir: Path
) -> None:
    """Finite weights can still overflow: that request ends in an error, its neighbours are exact, and so is whoever
    gets its KV blocks next."""
    directory = make_adapter(stories_dir, tmp_path / "huge", 1, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    file = directory / "adapter_model.safetensors"
    save_file({name: tensor * 1e30 for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})
    engine = make_engine(max_rows=8, block_tokens=4, kv_memory=2 * 5 * 4 * 8 * 4 * 4 * 40)
    huge, healthy = engine.deploy(directory), engine.deploy(adapter_dir)
    for _ in range(3):
        bad = engine.submit(STORY, 10, huge)
        cases = [Case(None, None, STORY, 12), Case(adapter_dir, healthy, [1, 90, 80, 70, 60], 12)]
        requests = [engine.submit(case.prompt, case.max_tokens, case.adapter) for case in cases]
        engine.run()
        assert ended(engine, bad).error_type == "internal"
        for case, request in zip(cases, requests, strict=True):
            assert not check(engine, reference, case, engine.outcomes[request].tokens, Tally())


def test_pool_exhausted_by_adapters_in_use(make_engine: MakeEngine, drawn_adapters: list[Path]) -> None:
    """One slot: the others wait in the queue and are served one after another; none starves."""
    engine = make_engine(adapter_slots=1)
    adapters = [engine.deploy(path) for path in drawn_adapters[:4]]
    requests = [engine.submit(STORY, 6, adapters[i % 4]) for i in range(12)]
    engine.run()
    assert all(ended(engine, r).reason in ("length", "stop") for r in requests)


def test_adapter_larger_than_the_pool(make_engine: MakeEngine, adapter_dir: Path) -> None:
    engine = make_engine(adapter_memory=8192)
    request = engine.submit(STORY, 4, engine.deploy(adapter_dir))
    engine.run()
    assert ended(engine, request).error_type == "too_large"
    assert "8192" in ended(engine, request).error


def test_a_seed_repeats_whatever_shares_the_batch(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ways = Sampling(temperature=0.9, top_p=0.95, seed=11)
    alone = engine.submit(STORY, 30, sampling=ways)
    engine.run()
    together = [engine.submit(STORY, 30, sampling=ways) for _ in range(2)]
    others = [engine.submit([1, 60 + i], 40, sampling=Sampling(seed=i)) for i in range(5)]
    engine.run()
    first = engine.outcomes[alone].tokens
    assert [engine.outcomes[r].tokens for r in together] == [first, first]
    assert len({tuple(engine.outcomes[r].tokens) for r in others}) == 5
    other_choice = engine.submit(STORY, 30, sampling=Sampling(temperature=0.9, top_p=0.95, seed=11, choice=1))
    engine.run()
    assert engine.outcomes[other_choice].tokens != first


def test_logprobs_equal_the_models_own(make_engine: MakeEngine, reference: PeftReference) -> None:
    engine = make_engine()
    request = engine.submit(STORY, 6, sampling=Sampling(temperature=0, logprobs=3))
    engine.run()
    outcome = engine.outcomes[request]
    want = torch.log_softmax(reference.logits(None, STORY + outcome.tokens[:-1]), dim=-1)[len(STORY) - 1 :]
    for i, (token, top) in enumerate(zip(outcome.tokens, outcome.logprobs, strict=True)):
        assert abs(top.logprob - float(want[i, token])) < 1e-3
        assert [t for t, _ in top.top] == want[i].topk(3).indices.tolist()


def test_stats_say_what_is(make_engine: MakeEngine, adapter_dir: Path) -> None:
    engine = make_engine()
    adapter = engine.deploy(adapter_dir)
    while not engine.engine.store.on_device(adapter.digest):  # tokens may come before the load's end, layer by layer
        engine.submit(STORY, 1, adapter)
        engine.run()
    request = engine.submit(STORY, 50, adapter, ignore_eos=True)
    engine.run(until=lambda: len(engine.outcomes[request].tokens) > 2)
    stats = stats_of(engine.engine)
    assert (stats.running, stats.queued, stats.batch_ranks) == (1, 0, [max(adapter.ranks)])
    assert [(r.digest, r.tier, r.in_use) for r in stats.residents] == [(adapter.digest, "device", 1)]
    assert stats.kv_blocks_free == engine.engine.blocks.total - engine.engine.blocks.blocks_for(54)
    engine.engine.cancel(request)
    engine.run()
