"""Prompts in captured stretches: their logits against the untouched model, and cold ones' tokens against PEFT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from node_agent.engine.batch import build_step
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.setup import find_runner
from node_agent.runner import cuda_prompts, cuda_runner
from node_agent.runner.cuda_decode import DecodeShape
from node_agent.runner.cuda_pass import LayeredPass, PromptPass
from node_agent.runner.cuda_prompts import MAX_DECODED_TOKENS, PromptBucket, prompt_shapes
from node_agent.runner.cuda_runner import CudaRunner
from node_agent.types import PassLora, Plan, StepBatch
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.late_stream import SlowStream
from tests.node_agent.test_cuda_runner import CONFIGS, VOCAB, request, save_random, settings_of
from tests.support.draws import draws
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptBucket, "stretch", 2)


def test_shapes() -> None:
    """A few rows of each size, and all rows of some; none beyond what a pass may have."""
    found = prompt_shapes(2048, 256)
    sizes = [16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
    assert [tokens for tokens, rows in found if rows == 8] == sizes
    assert [(t, rows) for t, rows in found if rows != 8] == [(64, 64), (128, 128), (256, 256), (512, 256), (1024, 256)]
    assert prompt_shapes(100, 4) == [(16, 4), (32, 4), (64, 4), (100, 4)]
    assert prompt_shapes(8, 32) == [(8, 8)]


# --- against the model itself


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(CONFIGS[request.param], tmp_path_factory.mktemp("random") / request.param)


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> tuple[CudaRunner, torch.nn.Module]:
    """A runner with two buckets, of which no adapter is asked."""
    runner = find_runner("cuda")(settings_of(model_dir))
    assert isinstance(runner, CudaRunner)
    shape = DecodeShape(4, 80, runner.block_tokens, VOCAB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptBucket, "stretch", 2)
        for tokens in (12, 40):
            bucket = PromptBucket(tokens, 4, shape, runner.decoder, runner.current, runner.stream)
            bucket.capture(lambda *_: lambda *_: None)
            runner.prompts.append(bucket)
    return runner, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def begin(runner: CudaRunner, rows: list[Row], n_decode: int) -> LayeredPass:
    run = runner.start(build_step(rows, n_decode, runner.block_tokens, torch.device("cpu")), None)
    assert isinstance(run, LayeredPass)
    return run


def end(runner: CudaRunner, run: LayeredPass, rows: list[Row]) -> torch.Tensor:
    run.advance(runner.num_layers)
    logits = run.logits().clone()
    run.finish()
    for row in rows:
        row.request.computed += row.length
    return logits


def expect(model: torch.nn.Module, found: torch.Tensor, requests: list[Request]) -> None:
    for logits, each in zip(found, requests, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([each.tokens[: each.computed]])).logits[0, -1]
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


@settings(max_examples=draws(5))
@given(data=st.data())
def test_passes_between_the_stretches_of_another(data: st.DataObject, pair: tuple[CudaRunner, torch.nn.Module]) -> None:
    """One prompt stands before a drawn stretch while another is computed, and rows decode beside a chunk of a third:
    each in memory of its own, what no bucket is left for kernel by kernel."""
    runner, model = pair
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=36), min_size=3, max_size=3))
    stands, other, late = (request(prompt, 1 + 20 * i) for i, prompt in enumerate(prompts))
    runs = [(begin(runner, rows, 0), rows) for rows in ([Row(each, len(each.tokens))] for each in (stands, other))]
    stop = data.draw(st.integers(0, runner.num_layers - 1))
    runs[0][0].advance(stop)
    assert runs[0][0].layer == stop // runs[0][0].stretch * runs[0][0].stretch
    expect(model, end(runner, *runs[1]), [other])
    other.tokens.append(7)
    cut = data.draw(st.integers(1, len(late.tokens)))
    mixed = [Row(other, 1), Row(late, cut)]
    found = end(runner, begin(runner, mixed, 1), mixed)
    expect(model, found, [other, late][: len(found)])  # of a prompt that goes on nobody wants logits
    expect(model, end(runner, *runs[0]), [stands])
    assert not any(bucket.in_use for bucket in runner.prompts)


def test_what_fits_in_no_bucket(pair: tuple[CudaRunner, torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many tokens or rows, a decode row of a long context, whoever comes while the bucket is another's, and few
    tokens in a bucket of many."""
    runner, _ = pair
    device = torch.device("cpu")

    def batch(lengths: list[int], n_decode: int = 0, computed: int = 0) -> StepBatch:
        rows = [Row(request([3] * (n + computed), 1 + 20 * i), n) for i, n in enumerate(lengths)]
        for row in rows[:n_decode]:
            row.request.computed = computed
        return build_step(rows, n_decode, runner.block_tokens, device)

    kinds: list[tuple[StepBatch, Any]] = [
        (batch([40]), PromptPass), (batch([41]), LayeredPass), (batch([1, 2, 3, 4]), PromptPass),
        (batch([1, 2, 3, 4, 5]), LayeredPass),
    ]  # fmt: skip
    for made, kind in kinds:
        run = runner.start(made, None)
        assert type(run) is kind
        run.abort()
    long = batch([1, 5], 1, 20)
    object.__setattr__(long, "context_lens", [MAX_DECODED_TOKENS + 1, 5])
    assert not any(bucket.fits(long) for bucket in runner.prompts)
    first, second, third = (runner.start(batch([9]), None) for _ in range(3))
    assert [type(run) for run in (first, second, third)] == [PromptPass, PromptPass, LayeredPass]
    first.abort()
    fourth = runner.start(batch([9]), None)
    assert type(fourth) is PromptPass
    first.abort()  # again: the bucket is another's by now
    assert type(runner.start(batch([9]), None)) is LayeredPass
    for run in (second, third, fourth):
        run.abort()
    monkeypatch.setattr(cuda_prompts, "LIGHT_TOKENS", 16)
    runs = [runner.start(batch([n]), None) for n in (9, 9, 20)]
    assert [type(run) for run in runs] == [PromptPass, LayeredPass, PromptPass]
    for run in runs:
        run.abort()


# --- the whole engine


class Noting(CudaRunner):
    """Says how its passes' layers were advanced."""

    def start(self, batch: StepBatch, lora: PassLora | None) -> Any:
        run = super().start(batch, lora)
        advance = run.advance

        def note(to_layer: int) -> None:
            advance(to_layer)
            self.stands.append((type(run), run.layer))

        run.advance = note  # type: ignore[method-assign]
        return run


@pytest.fixture
def engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """Its captured work runs late."""
    stream = SlowStream()
    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: stream)
    monkeypatch.setattr(cuda_runner, "CudaRunner", Noting)
    Noting.stands = []
    made = make_engine(runner="cuda", max_rows=4, block_tokens=4, chunk_tokens=64)
    stream.late = True
    return made


def test_a_cold_prompt_goes_as_far_as_its_layers_have_come(
    engine: LocalEngine, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """Five layers in stretches of two: it stands before the third, the fifth, and at the end; others' prompts and steps
    run meanwhile, in other memory. Tokens are PEFT's."""
    link, path = HeldLink(engine), drawn_adapters[0]
    engine.engine.cold_start.plan = lambda *_: Plan("pipeline")  # type: ignore[method-assign]
    cases = [Case(path, engine.deploy(path), [1, *range(50, 70)], 6), Case(None, None, [1, 44, 45], 8)]
    requests = [engine.submit(case.prompt, case.max_tokens, case.adapter, ignore_eos=True) for case in cases]
    for layers, stands in ((3, 2), (1, 4)):
        link.let(layers)
        engine.run(lambda stands=stands: (PromptPass, stands) in Noting.stands)
    assert not engine.outcomes[requests[0]].tokens
    other = Case(None, None, [1, *range(100, 130)], 4)
    requests.append(engine.submit(other.prompt, other.max_tokens, ignore_eos=True))
    engine.run(lambda: engine.outcomes[requests[2]].finished is not None)
    assert not engine.outcomes[requests[0]].tokens
    link.open()
    engine.run()
    tally = Tally()
    for case, request_id in zip([*cases, other], requests, strict=True):
        assert not check(engine, reference, case, engine.outcomes[request_id].tokens, tally)
    finished = engine.outcomes[requests[0]].finished
    assert finished is not None and finished.cold_start.layers_device == engine.base.num_layers
    engine.assert_clean()
    assert not any(bucket.in_use for bucket in engine.engine.runner.prompts)  # type: ignore[attr-defined]


def test_a_load_that_fails_and_a_caller_who_leaves(engine: LocalEngine, drawn_adapters: list[Path]) -> None:
    """Between two stretches: the bucket is free again, and the next prompt's tokens are right."""
    link = HeldLink(engine)
    engine.engine.cold_start.plan = lambda *_: Plan("pipeline")  # type: ignore[method-assign]
    wanted = engine.submit([1, 60, 61], 4, ignore_eos=True)
    engine.run()
    first, second = (engine.deploy(path) for path in drawn_adapters[:2])
    gone = engine.submit([1, 60, 61], 4, first, ignore_eos=True)
    link.let(2)
    engine.run(lambda: (PromptPass, 2) in Noting.stands)
    engine.engine.cancel(gone)
    failing = engine.submit([1, 60, 61], 4, second, ignore_eos=True)
    engine.run(lambda: failing in engine.engine.running and len(engine.engine.cold.open) > 0)
    engine.engine.store.loader.abandon(engine.engine.store.device[second.digest].copy)
    engine.run()
    link.open()
    outcome = engine.outcomes[failing].finished
    assert outcome is not None and outcome.reason == "error" and outcome.error_type == "unavailable"
    again = engine.submit([1, 60, 61], 4, ignore_eos=True)
    engine.run()
    assert engine.results([again]) == engine.results([wanted])
    assert not any(bucket.in_use for bucket in engine.engine.runner.prompts)  # type: ignore[attr-defined]


def test_prompts_that_differ_are_not_captured(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = PromptBucket.enqueue

    def wrong(self: PromptBucket, layer: int, adapted: bool) -> None:
        real(self, layer, adapted)
        if self.tokens == 64:
            self.hidden.residual += 0.5

    monkeypatch.setattr(PromptBucket, "enqueue", wrong)
    engine = make_engine(runner="cuda", max_rows=4, chunk_tokens=64)
    (record,) = [record for record in caplog.records if "prompts run without a CUDA graph" in record.message]
    assert "a prompt in a bucket of 64 tokens and 4 rows: logits" in record.reason
    runner = engine.engine.runner
    assert isinstance(runner, CudaRunner) and not runner.prompts and runner.buckets
