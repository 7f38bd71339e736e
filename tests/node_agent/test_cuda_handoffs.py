"""Prompts in captured pieces, with handoffs between them: logits against merged weights, on a device that runs late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from node_agent.engine.batch import build_step
from node_agent.engine.rows import Row
from node_agent.engine.setup import find_runner
from node_agent.runner import cuda_handoffs, cuda_prompts, cuda_runner
from node_agent.runner.cuda_decode import DecodeShape
from node_agent.runner.cuda_handoffs import HANDOFF_GROUPS, HandoffLayer, allocate_buffers
from node_agent.runner.cuda_pass import HandoffPass, LayeredPass
from node_agent.runner.cuda_prompts import PromptBucket, handoff_buckets
from node_agent.runner.cuda_runner import CudaRunner
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.lora import NoHandoffs
from node_agent.types import GROUPS, StepBatch
from tests.node_agent.late_stream import LateStream
from tests.node_agent.test_cuda_runner import CONFIGS, VOCAB, request, save_random, settings_of
from tests.support.draws import draws
from tests.support.local_engine import MakeEngine

STRETCH = 2
PATHS = {"qkv": "self_attn.{}_proj", "o": "self_attn.{}_proj", "gate_up": "mlp.{}_proj", "down": "mlp.{}_proj"}


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptBucket, "stretch", STRETCH)


class Handing:
    """An ArrivingLora whose workers' part is computed on the stream: what reads too early, or is read too early, gives
    wrong numbers. Says when it was called in the stream's log."""

    on_device = None
    hands_over = True

    def __init__(self, stream: LateStream, groups: Collection[str], runner: CudaRunner, seed: int) -> None:
        self._stream, self._groups = stream, groups
        generator = torch.Generator().manual_seed(seed)
        self.weights = {
            (index, group): [
                (torch.randn(layer.projection(group).d_in, 3, generator=generator) * 0.1,
                 torch.randn(3, width, generator=generator) * 0.1)
                for width in layer.projection(group).widths
            ]
            for index, layer in enumerate(runner.decoder.layers)
            for group in groups
        }  # fmt: skip
        self._parts: list[torch.Tensor] = []

    def adapts(self, layer: int, group: str) -> bool:
        return (layer, group) in self.weights

    def claim(self, layer: int) -> bool:
        return False

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        self._stream.log.append(f"begin {layer} {group} {x.shape[0]}")
        if not self.adapts(layer, group):
            return False

        def compute() -> None:
            self._parts = [x @ a @ b for a, b in self.weights[layer, group]]

        self._stream.enqueue(compute)
        return True

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        self._stream.log.append(f"finish {layer} {group}")

        def add() -> None:
            for y, part in zip(ys, self._parts, strict=True):
                y.add_(part)

        self._stream.enqueue(add)

    def merged(self, model: torch.nn.Module) -> torch.nn.Module:
        """Adds its parts to the weights of an untouched model."""
        names = {"qkv": "qkv", "o": "o", "gate_up": ("gate", "up"), "down": ("down",)}
        for (index, group), parts in self.weights.items():
            for name, (a, b) in zip(names[group], parts, strict=True):
                linear: Any = model.get_submodule(f"model.layers.{index}.{PATHS[group].format(name)}")
                linear.weight.data += (a @ b).T
        return model


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(CONFIGS[request.param], tmp_path_factory.mktemp("random") / request.param)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> CudaRunner:
    """Its two buckets are captured between handoffs, by a stream that runs late."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_runner, "open_stream", lambda _: LateStream())
        patch.setattr(PromptBucket, "stretch", STRETCH)
        made = find_runner("cuda")(settings_of(model_dir))
        assert isinstance(made, CudaRunner)
        shape, buffers = DecodeShape(4, 80, made.block_tokens, VOCAB), allocate_buffers(made.decoder, 40)
        for tokens in (12, 40):
            bucket = PromptBucket(tokens, 4, shape, made.decoder, made.current, made.stream)
            bucket.capture(lambda *_: lambda *_: None)
            bucket.capture_handoff_layers(buffers)
            made.prompts.append(bucket)
    return made


def batch_of(runner: CudaRunner, prompt: list[int]) -> StepBatch:
    return build_step([Row(request(prompt, 1), len(prompt))], 0, runner.block_tokens, torch.device("cpu"))


@settings(max_examples=draws(6))
@given(data=st.data())
def test_logits_are_those_of_merged_weights(data: st.DataObject, runner: CudaRunner, model_dir: Path) -> None:
    """For any groups of the adapter, and wherever the pass stops in between."""
    groups = data.draw(st.sets(st.sampled_from(list(GROUPS)), min_size=1))
    prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=36))
    stop = data.draw(st.integers(0, runner.num_layers))
    stream = runner.stream
    assert isinstance(stream, LateStream)
    lora = Handing(stream, groups, runner, data.draw(st.integers(0, 99)))
    model = lora.merged(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval())
    run = runner.start(batch_of(runner, prompt), lora)
    assert isinstance(run, HandoffPass) and run.stretch == 1
    stream.late = True
    try:
        for layer in (stop, runner.num_layers):
            run.advance(layer)
            assert run.layer == layer
        stream.run(stream.event()._until)
    finally:
        stream.late = False
    found = run.logits()
    run.abort()
    assert not any(bucket.in_use for bucket in runner.prompts)
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1]
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()(torch.tensor([prompt]))
    torch.testing.assert_close(found[0], wanted, atol=2e-4, rtol=2e-4)
    assert not torch.allclose(found[0], base.logits[0, -1], atol=2e-4, rtol=2e-4), "the adapter changes nothing"


@pytest.mark.parametrize("groups", [("qkv",), ("o", "down"), tuple(GROUPS)])
def test_handoffs_are_enqueued_between_graphs(runner: CudaRunner, groups: tuple[str, ...]) -> None:
    """In the order of layers and groups, with the base product between the two halves; a layer is cut nowhere else than
    its adapter needs, where that is at q, k and v alone. The batch's own rows are handed over, without padding."""
    stream, prompt = runner.stream, [3, 4, 5, 6, 7]
    assert isinstance(stream, LateStream)
    lora = Handing(stream, groups, runner, 0)
    run = runner.start(batch_of(runner, prompt), lora)
    with stream.running_late():
        run.advance(runner.num_layers)
        log = [entry for entry in stream.log if entry != "wait"]
    cut = ("qkv",) if groups == ("qkv",) else tuple(GROUPS)
    wanted: list[str] = []
    for layer in range(runner.num_layers):
        for group in cut:
            adds = group in groups
            wanted += ["captured", f"begin {layer} {group} 5", *["work"] * adds, "captured"]
            wanted += [f"finish {layer} {group}", "work"] * adds
        wanted.append("captured")
    assert log == wanted
    run.abort()


def test_stretches_that_have_arrived_are_enqueued_whole(runner: CudaRunner) -> None:
    """Three layers in stretches of two: what is on the device from a stretch's begin on is one graph, and what is not,
    or is to be computed only in part, is pieces."""
    stream = runner.stream
    assert isinstance(stream, LateStream)

    class Arrived(NoHandoffs):
        def __init__(self, layers: Collection[int]) -> None:
            super().__init__(("qkv",))
            self.layers = layers

        def claim(self, layer: int) -> bool:
            return layer in self.layers

    for layers, stops, graphs in (
        ((), (3,), [3, 3, 3]),
        ((0, 1), (3,), [1, 3]),
        ((0, 1, 2), (3,), [1, 1]),
        ((1, 2), (3,), [3, 3, 1]),
        ((0, 1, 2), (1, 3), [3, 3, 1]),
    ):
        run = runner.start(batch_of(runner, [3, 4, 5]), Arrived(layers))
        with stream.running_late():
            for stop in stops:
                run.advance(stop)
            assert stream.log == ["captured"] * sum(graphs), (layers, stops)
        run.abort()


def test_what_is_not_captured_between_handoffs(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt for which no such bucket is free is launched kernel by kernel, also where one without handoffs is."""
    lora = NoHandoffs(("qkv",))
    kinds = [(9, HandoffPass), (9, HandoffPass), (9, LayeredPass)]
    runs = [runner.start(batch_of(runner, [3] * tokens), lora) for tokens, _ in kinds]
    assert [type(run) for run in runs] == [kind for _, kind in kinds]
    for run in runs:
        run.abort()
    monkeypatch.setattr(runner.prompts[0], "handoff_layers", [])
    run = runner.start(batch_of(runner, [3] * 9), lora)
    assert isinstance(run, HandoffPass) and run._bucket is runner.prompts[1]
    run.abort()


def test_no_more_graphs_than_there_may_be(runner: CudaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_handoffs.GRAPHS_PER_LAYER == 12
    both = runner.prompts
    assert handoff_buckets(both, 32) == both
    monkeypatch.setattr(cuda_prompts, "MAX_GRAPHS", 12 * 3)
    assert handoff_buckets(both, 3) == both[:1]
    assert handoff_buckets(both, 4) == []
    monkeypatch.setattr(cuda_prompts, "MAX_GRAPHS", 1000)
    monkeypatch.setattr(cuda_prompts, "LIGHT_TOKENS", 39)
    assert handoff_buckets(both, 3) == both[:1]


# --- at the start


def test_buckets_of_an_engine(make_engine: MakeEngine) -> None:
    """Those of few rows and tokens, in every layer; the pieces compute what the model does."""
    runner = make_engine(runner="cuda", max_rows=8, chunk_tokens=320).engine.runner
    assert isinstance(runner, CudaRunner) and not any(bucket.handoff_layers for bucket in runner.prompts)
    runner.capture_handoffs()
    found = [(bucket.tokens, bucket.rows) for bucket in runner.prompts if bucket.handoff_layers]
    assert found == [(16, 8), (32, 8), (64, 8), (128, 8), (192, 8), (256, 8)]
    for bucket in runner.prompts:
        assert {len(layer) for layer in bucket.handoff_layers} <= {len(HANDOFF_GROUPS)}
        assert len(bucket.handoff_layers) in (0, runner.num_layers)


@pytest.mark.parametrize(
    "fault", ["out of memory", "operation not permitted when stream is capturing", "other numbers"]
)
def test_pieces_that_fail_are_not_used(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    runner = make_engine(runner="cuda", max_rows=4, chunk_tokens=64).engine.runner
    assert isinstance(runner, CudaRunner)
    captured: Counter[str] = Counter()

    class Failing(Stream):
        def capture(self, work: Any) -> Any:
            captured["pieces"] += 1
            if captured["pieces"] > 20:
                raise RuntimeError(f"CUDA error: {fault}")
            return super().capture(work)

    if fault == "other numbers":
        real = HandoffLayer.enqueue

        def wrong(self: HandoffLayer, *given: Any) -> None:
            real(self, *given)
            if self.groups == tuple(GROUPS) and self.index == 3:
                self._bucket.hidden.residual += 0.5

        monkeypatch.setattr(HandoffLayer, "enqueue", wrong)
    else:
        for bucket in runner.prompts:
            monkeypatch.setattr(bucket, "_stream", Failing())
    runner.capture_handoffs()
    (record,) = [r for r in caplog.records if "prompts with handoffs run without a CUDA graph" in r.message]
    assert ("cut at qkv, o, gate_up, down: logits" if fault == "other numbers" else fault) in record.reason
    assert runner.prompts and not any(bucket.handoff_layers for bucket in runner.prompts)
    run = runner.start(batch_of(runner, [3, 4]), NoHandoffs(("qkv",)))
    assert type(run) is LayeredPass
    run.abort()
