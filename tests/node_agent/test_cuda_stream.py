"""A decode step of `node.runner: cuda` never waits: the real engine and runner over a device that runs late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.local_engine import LocalEngine, MakeEngine
from cluster.messages import Adapter, Sampling
from node_agent.runner import cuda_runner
from node_agent.runner.cuda_runner import CudaRunner
from node_agent.runner.cuda_stream import CpuStream
from tests.node_agent.late_stream import Capturing, LateStream

WAYS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, top_p=0.8, seed=11, logprobs=2),
    Sampling(temperature=1.2, top_k=30, min_p=0.02, seed=12),
]
TOKENS = 10
STEP = ["upload", "captured", "captured", "download", "wait"]
"""What a step enqueues, and the one wait, for its tokens."""


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    made = LateStream()
    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: made)
    return made


def own_memory(engine: LocalEngine, stream: LateStream) -> None:
    """All that lies on the device, as far as a pass reads or writes it."""
    runner = engine.engine.runner
    assert isinstance(runner, CudaRunner)
    decoder, store = runner.decoder, engine.engine.store
    stream.own(decoder.embed_tokens.weight, decoder.head.weight, decoder.rotary.cos, decoder.rotary.sin)
    for layer in decoder.layers:
        stream.own(layer.cache.keys, layer.cache.values, layer.qkv.linear.weight, layer.down.linear.weight)
    stream.own(store.pool.data, store.table.rank)


def submit(engine: LocalEngine, adapters: list[Adapter]) -> list[str]:
    kinds = [None, *adapters]
    return [
        engine.submit([1, *range(50 + i, 60 + 2 * i)], TOKENS, kinds[i % len(kinds)], way, ignore_eos=True)
        for i, way in enumerate(WAYS)
    ]


def to_decoding(engine: LocalEngine) -> None:
    engine.run(lambda: all(request.decoding for request in engine.engine.running.values()))
    assert len(engine.engine.running) == len(WAYS)


@pytest.mark.parametrize("adapters", [0, 2])
def test_a_decode_step_waits_for_its_tokens_alone(
    adapters: int, make_engine: MakeEngine, stream: LateStream, drawn_adapters: list[Path]
) -> None:
    """One copy each way per step, two captured parts, nothing allocated; tokens are the other runner's."""
    made = {}
    for name in ("transformers", "cuda"):
        engine = make_engine(runner=name, max_rows=4, block_tokens=4)
        deployed = [engine.deploy(path) for path in drawn_adapters[:adapters]]
        for adapter in deployed:
            engine.submit([1, 30, 31], 1, adapter)
            engine.run()
        requests = submit(engine, deployed)
        to_decoding(engine)
        if name == "cuda":
            own_memory(engine, stream)
            with stream.running_late():
                engine.run()
            steps = len(stream.log) // len(STEP)
            assert steps >= TOKENS - 2
            assert stream.log == STEP * steps
        else:
            engine.run()
        made[name] = engine.results(requests)
        assert all(len(tokens) == TOKENS for tokens in made[name])
    assert made["cuda"] == made["transformers"]


def test_rules_cost_a_copy_more_and_no_wait(make_engine: MakeEngine, stream: LateStream) -> None:
    way = Sampling(temperature=0.0, repetition_penalty=1.3, logit_bias={300: 1.0})
    made = {}
    for name in ("transformers", "cuda"):
        engine = make_engine(runner=name, max_rows=4, block_tokens=4)
        requests = [engine.submit([1, 60, 61, 62], TOKENS, None, each, ignore_eos=True) for each in (way, WAYS[0])]
        engine.run()
        made[name] = engine.results(requests)
    assert made["cuda"] == made["transformers"]


# --- the watch itself can fail


def test_an_early_read_is_seen(make_engine: MakeEngine, stream: LateStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that reads its tokens when the step is enqueued, or touches the device beside the stream."""
    engine = make_engine(runner="cuda", max_rows=4, block_tokens=4)
    submit(engine, [])
    to_decoding(engine)
    own_memory(engine, stream)
    runner = engine.engine.runner
    assert isinstance(runner, CudaRunner)
    bucket = runner.buckets[-1]
    with stream.running_late(), pytest.raises(AssertionError, match="on the device's memory, outside the stream"):
        bucket.fields.token_ids.sum()
    with stream.running_late():
        event = stream.event()
        assert event.query()
        stream.upload(torch.zeros(1), torch.ones(1), 1)
        late = stream.event()
        assert not late.query() and stream.log == ["upload"]
    assert late.query()
    engine.end()


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


def test_captured_work_on_a_cpu_is_the_work() -> None:
    ran = []
    CpuStream().capture(lambda: ran.append(1))()
    assert ran == [1]
