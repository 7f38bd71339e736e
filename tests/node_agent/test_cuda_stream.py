"""A decode step of `node.runner: cuda` never waits: the real engine and runner over a device that runs late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cluster.messages import Adapter, Sampling
from node_agent.runner import cuda_runner
from node_agent.runner.cuda_runner import CudaRunner
from node_agent.runner.cuda_stream import CudaStream, Stream
from tests.node_agent.late_stream import Capturing, LateStream
from tests.support.local_engine import LocalEngine, MakeEngine, Outcome

WAYS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_p=0.8, seed=11, logprobs=2),
    Sampling(temperature=1.2, top_k=30, min_p=0.02, seed=12),
]
TOKENS = 10
BLOCK_BYTES = 2 * 5 * 4 * 8 * 4 * 4
"""Of 4 tokens of stories260K in fp32."""
STEP = ["upload", "captured", "captured", "download"]
"""What a step enqueues; then its tokens are awaited."""
RULED_STEP = [*STEP[:2], "allocate host", "allocate device", "upload", "work", "download"]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    made = LateStream()
    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: made)
    return made


@pytest.fixture
def pair(make_engine: MakeEngine, stream: LateStream, drawn_adapters: list[Path]) -> dict[str, LocalEngine]:
    """Engines with either runner, and two adapters on their devices."""
    engines = {
        name: make_engine(runner=name, max_rows=4, block_tokens=4, chunk_tokens=64) for name in ("transformers", "cuda")
    }
    for engine in engines.values():
        for path in drawn_adapters[:2]:
            engine.submit([1, 30, 31], 1, engine.deploy(path))
        engine.run()
    own_memory(engines["cuda"], stream)
    return engines


def adapters_of(engine: LocalEngine, drawn: list[Path]) -> list[Adapter | None]:
    return [None, *(engine.deploy(path) for path in drawn[:2])]


def own_memory(engine: LocalEngine, stream: LateStream) -> None:
    """All that lies on the device, as far as a pass reads or writes it."""
    runner = engine.engine.runner
    assert isinstance(runner, CudaRunner)
    decoder, store = runner.decoder, engine.engine.store
    stream.own(decoder.embed_tokens.weight, decoder.head.weight, decoder.rotary.cos, decoder.rotary.sin)
    for layer in decoder.layers:
        stream.own(layer.cache.keys, layer.cache.values, layer.qkv.linear.weight, layer.down.linear.weight)
    stream.own(store.pool.data, store.table.rank)


def submit(engine: LocalEngine, kinds: list[Adapter | None], ways: list[Sampling]) -> list[str]:
    return [
        engine.submit([1, *range(50 + i, 60 + 2 * i)], TOKENS, kinds[i % len(kinds)], way, ignore_eos=True)
        for i, way in enumerate(ways)
    ]


def to_decoding(engine: LocalEngine) -> None:
    """Until every prompt is computed, with no step under way."""
    engine.run(lambda: all(request.decoding for request in engine.engine.running.values()))
    assert engine.engine.running and not engine.engine.overlap.under_way


def test_a_step_is_enqueued_while_the_one_before_runs(
    pair: dict[str, LocalEngine], stream: LateStream, drawn_adapters: list[Path]
) -> None:
    """One copy each way per step, two captured parts, nothing allocated, and a wait for tokens alone, when the next
    step is enqueued already. Tokens and log probabilities are the other runner's."""
    made: dict[str, list[Outcome]] = {}
    for name, engine in pair.items():
        made[name] = []
        for kinds in ([None], adapters_of(engine, drawn_adapters)):
            requests = submit(engine, kinds, WAYS)
            to_decoding(engine)
            spent, begun = {r.id: r.device_seconds for r in engine.engine.running.values()}, time.perf_counter()
            if name == "cuda":
                with stream.running_late():
                    engine.run()
                check_log(stream.log, STEP)
            engine.run()
            check_device_time(engine, spent, time.perf_counter() - begun)
            made[name] += [engine.outcomes[request] for request in requests]
    assert made["cuda"][1].tokens != made["cuda"][4].tokens, "the adapters change nothing"
    for mine, other in zip(made["cuda"], made["transformers"], strict=True):
        assert mine.tokens == other.tokens and len(mine.tokens) == TOKENS
        for a, b in zip(mine.logprobs, other.logprobs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or a.logprob == pytest.approx(b.logprob, abs=1e-4)


def check_device_time(engine: LocalEngine, spent: dict[str, float], seconds: float) -> None:
    """Each request has had some of the steps' time since it had `spent` so much, and together they had no more than has
    passed, though steps overlap."""
    ends = {request: engine.outcomes[request].finished for request in spent}
    more = [end.device - spent[request] for request, end in ends.items() if end is not None]
    assert len(more) == len(spent) and min(more) > 0 and sum(more) <= seconds


def check_log(log: list[str], step: list[str]) -> None:
    """Whole steps, one in front of each wait but the last."""
    steps = log.count("download")
    assert [entry for entry in log if entry != "wait"] == step * steps and steps >= TOKENS - 3
    waits = [i for i, entry in enumerate(log) if entry == "wait"]
    assert waits == [min(i + 2, steps) * len(step) + i for i in range(steps)]


def test_rows_may_share_blocks(make_engine: MakeEngine, stream: LateStream) -> None:
    """Together they have more than there are."""
    prompt, made = [1, *range(60, 120)], {}
    for name in ("transformers", "cuda"):
        engine = make_engine(runner=name, max_rows=4, block_tokens=4, chunk_tokens=64, kv_memory=40 * BLOCK_BYTES)
        first = engine.submit(prompt, TOKENS, ignore_eos=True)
        engine.run(until=lambda engine=engine, first=first: bool(engine.outcomes[first].tokens))
        others = [engine.submit([*prompt[:57], end], TOKENS, ignore_eos=True) for end in (5, 6)]
        engine.run(until=lambda engine=engine, others=others: all(engine.results(others)))
        assert sum(len(r.blocks) for r in engine.engine.running.values()) > engine.engine.blocks.total
        engine.run()
        assert [engine.outcomes[request].cached_tokens for request in others] == [56, 56]
        made[name] = engine.results([first, *others])
    assert made["cuda"] == made["transformers"]


def test_blocks_of_a_step_that_runs_are_waited_for(make_engine: MakeEngine, stream: LateStream) -> None:
    """A strict request that takes them from others enters when the step has ended; the others go on later, unharmed."""
    engine = make_engine(runner="cuda", max_rows=8, block_tokens=4, chunk_tokens=16, kv_memory=41 * BLOCK_BYTES)
    flood = [engine.submit([1, 50 + i], 44, tenant="cheap", slo_class="best_effort", ignore_eos=True) for i in range(3)]
    to_decoding(engine)
    with stream.running_late():
        engine.step()
        assert engine.engine.overlap.under_way
        strict = engine.submit([1, 50], 60, tenant="dear", slo_class="strict", ttft=5.0, ignore_eos=True)
        engine.step()
        assert not engine.outcomes[strict].admitted
        engine.step()
        assert engine.outcomes[strict].admitted
    engine.run()
    assert [len(tokens) for tokens in engine.results([*flood, strict])] == [44, 44, 44, 60]
    assert engine.results([strict])[0][:44] == engine.results(flood)[0]


def test_a_step_of_which_nothing_counts_is_waited_for(make_engine: MakeEngine, stream: LateStream) -> None:
    """Nobody else would say when the blocks of all its rows are free."""
    engine = make_engine(runner="cuda", max_rows=8, block_tokens=4, chunk_tokens=16, kv_memory=41 * BLOCK_BYTES)
    gives = engine.submit([1, 50], 120, tenant="cheap", slo_class="best_effort", ignore_eos=True)
    to_decoding(engine)
    with stream.running_late():
        engine.step()
        assert engine.engine.overlap.under_way
        strict = engine.submit([1, 50], 60, tenant="dear", slo_class="strict", ttft=5.0, ignore_eos=True)
        assert not engine.step() and not engine.outcomes[strict].admitted
        engine.engine.prepare()
        engine.book()
        assert engine.outcomes[strict].admitted
    engine.run()
    assert [len(tokens) for tokens in engine.results([gives, strict])] == [120, 60]


def test_rules_cost_a_copy_more(pair: dict[str, LocalEngine], stream: LateStream) -> None:
    """And the next step waits for the tokens of the one before; nothing else does."""
    ways = [Sampling(temperature=0.7, seed=2, repetition_penalty=1.3, logit_bias={300: 1.0}), WAYS[0]]
    made = {}
    for name, engine in pair.items():
        requests = submit(engine, [None], ways)
        to_decoding(engine)
        if name == "cuda":
            with stream.running_late():
                engine.run()
            assert stream.log == [*RULED_STEP, "wait"] * stream.log.count("wait")
        engine.run()
        made[name] = engine.results(requests)
    assert made["cuda"] == made["transformers"]


def test_what_comes_between_two_steps(
    pair: dict[str, LocalEngine], stream: LateStream, drawn_adapters: list[Path]
) -> None:
    """A request ends by its token while the step behind it is enqueued, one is cancelled, one gives its place away, one
    arrives: the others' tokens stay what they are, and blocks are free when the last step that writes them has run."""
    reference, engine = pair["transformers"], pair["cuda"]
    requests = submit(reference, adapters_of(reference, drawn_adapters), WAYS)
    late = reference.submit([1, 90, 91], 4, ignore_eos=True)
    reference.run()
    wanted, wanted_late = reference.results(requests), reference.results([late])[0]

    kinds = adapters_of(engine, drawn_adapters)
    requests = submit(engine, kinds, WAYS)
    ends = engine.submit(
        [1, 50, *range(51, 60)], TOKENS, None, Sampling(temperature=0.0, stop_token_ids=[wanted[0][3]])
    )
    to_decoding(engine)
    core = engine.engine
    with stream.running_late():
        while engine.outcomes[ends].finished is None:
            engine.step()
        assert core.overlap.under_way
        assert core.blocks.total - core.blocks.free > sum(len(r.blocks) for r in core.running.values())
    core.blocks.poll()
    assert core.blocks.total - core.blocks.free == sum(len(r.blocks) for r in core.running.values())
    assert engine.results([ends]) == [wanted[0][: wanted[0].index(wanted[0][3]) + 1]]
    engine.step()
    assert core.overlap.under_way
    core._preempt(core.running[requests[1]])
    engine.step()
    late = engine.submit([1, 90, 91], 4, ignore_eos=True)
    engine.step()
    core.cancel(requests[2])
    engine.run()
    assert engine.results([*requests[:2], late]) == [*wanted[:2], wanted_late]
    cut = engine.results(requests)[2]
    assert cut == wanted[2][: len(cut)]


def test_a_promise_between_tokens_is_looked_at_before_every_step(make_engine: MakeEngine) -> None:
    engine = make_engine(runner="cuda", max_rows=1, chunk_tokens=64)
    engine.submit([1, 60, 61], 6, slo_class="strict", tpot=5.0, ignore_eos=True)
    to_decoding(engine)
    while engine.engine.busy:
        engine.step()
        assert not engine.engine.overlap.under_way


# --- the watch itself can fail


def test_what_touches_the_device_beside_the_stream_is_seen() -> None:
    stream = LateStream()
    block = stream.empty(8)
    with stream.running_late(), pytest.raises(AssertionError, match="on the device's memory, outside the stream"):
        block[:4].sum()
    with stream.running_late():
        stream.upload(torch.zeros(1), torch.ones(1), 1)
        late = stream.event()
        assert not late.query() and stream.log == ["upload"]
    assert late.query()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.tensor([1.0, 2.0]) + x,
    ],
)
def test_what_cannot_be_captured_is_seen(work) -> None:
    with pytest.raises(AssertionError, match="in captured work"), Capturing():
        work(torch.ones(2))


def test_what_a_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for torch.cuda: a capture after two runs on another stream, into memory that graphs share."""
    said: list[str] = []
    made = torch.cuda

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Named) -> None:
            said.append(f"{self.name} waits for {other.name}")

        def replay(self) -> None:
            said.append("replay")

    @contextmanager
    def inside(what: object, **named: object) -> Iterator[None]:
        said.append(f"in {getattr(what, 'name', '')} {sorted(named.items())}")
        yield

    for name, stand_in in {
        "graph_pool_handle": lambda: 7,
        "current_stream": lambda _: Named("current"),
        "Stream": lambda _: Named("side"),
        "CUDAGraph": lambda: Named("graph"),
        "stream": inside,
        "graph": inside,
    }.items():
        monkeypatch.setattr(made, name, stand_in)
    replay = CudaStream(torch.device("cuda")).capture(lambda: said.append("work"))
    captured = "in graph [('capture_error_mode', 'thread_local'), ('pool', 7)]"
    waits = ["side waits for current", "in side []", "work", "work", "current waits for side"]
    assert said == [*waits, "in current []", captured, "work"]
    replay()
    assert said[-1] == "replay"


def test_captured_work_on_a_cpu_is_the_work() -> None:
    ran = []
    Stream().capture(lambda: ran.append(1))()
    assert ran == [1]
