"""`node.runner: cuda` on a CPU: its logits against the untouched model, and the engine's tokens against PEFT's."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from triton.runtime.errors import OutOfResources

from cluster.messages import Sampling
from kernels.gpu_triton import TritonOperations
from node_agent.cores import spare_cores
from node_agent.engine.batch import build_step
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.setup import find_runner
from node_agent.runner import auto_runner, cuda_layers, cuda_runner
from node_agent.runner.cuda_decode import bucket_sizes
from node_agent.runner.cuda_layers import Decoder
from node_agent.runner.cuda_pass import CapturedPass, LayeredPass, PromptPass
from node_agent.runner.cuda_runner import CudaRunner, open_runner
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.transformers_runner import TransformersRunner, load_model
from node_agent.types import PassLora, Plan, RunnerSettings, StepBatch
from tests.node_agent.coldstart.held_link import HeldLink
from tests.node_agent.late_stream import SlowStream
from tests.support.draws import draws
from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, MakeEngine
from tests.support.peft_reference import PeftReference

pytestmark = pytest.mark.usefixtures("quick_interpreter")
VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
          "original_max_position_embeddings": 32}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, head_dim=16, attention_bias=True, rope_parameters=LLAMA3),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
}


def save_random(config: PreTrainedConfig, path: Path) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(CONFIGS[request.param], tmp_path_factory.mktemp("random") / request.param)


def settings_of(model_dir: Path, dtype: torch.dtype = torch.float32) -> RunnerSettings:
    return RunnerSettings(model_dir, torch.device("cpu"), dtype, block_tokens=4, num_blocks=lambda _: 128)


def request(tokens: list[int], first_block: int) -> Request:
    made = Request("r", "t", tokens, 1, Sampling(temperature=0), 0.0, None, False)
    made.blocks = list(range(first_block, first_block + 20))
    return made


def advance(runner: CudaRunner, rows: list[Row], n_decode: int, stops: list[int]) -> torch.Tensor:
    run = LayeredPass(runner, build_step(rows, n_decode, runner.block_tokens, torch.device("cpu")), None)
    for layer in [*stops, runner.num_layers]:
        run.advance(layer)
    for row in rows:
        row.request.computed += row.length
    return run.logits()


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> tuple[CudaRunner, torch.nn.Module]:
    runner = find_runner("cuda")(settings_of(model_dir))
    assert isinstance(runner, CudaRunner)
    return runner, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@settings(max_examples=draws(5))
@given(data=st.data())
def test_chunks_and_decodes_equal_the_whole(data: st.DataObject, pair: tuple[CudaRunner, torch.nn.Module]) -> None:
    """Sequences prefilled in drawn chunks, then decoded, some beside others' chunks."""
    runner, model = pair
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=30), min_size=2, max_size=3))
    requests = [request(prompt[:], 1 + 20 * i) for i, prompt in enumerate(prompts)]
    for r in requests:  # each alone up to a border
        border = data.draw(st.integers(1, len(r.tokens) - 1))
        while r.computed < border:
            advance(runner, [Row(r, min(data.draw(st.integers(1, 9)), border - r.computed))], 0, [])
    stops = sorted(data.draw(st.lists(st.integers(0, runner.num_layers), max_size=2)))
    first, others = requests[0], requests[1:]
    advance(runner, [Row(first, len(first.tokens) - first.computed)], 0, stops)
    first.tokens.append(5)
    for rows, n_decode in (
        ([Row(first, 1), *(Row(r, len(r.tokens) - r.computed) for r in others)], 1),
        ([Row(r, 1) for r in requests], len(requests)),
    ):
        got = advance(runner, rows, n_decode, stops)
        for i, r in enumerate(requests):
            with torch.inference_mode():
                want = model(torch.tensor([r.tokens])).logits[0, -1]
            torch.testing.assert_close(got[i], want, atol=1e-4, rtol=1e-4)
            r.tokens.append(int(want.argmax()))


def test_bf16_is_as_close_as_the_models_own(model_dir: Path) -> None:
    runner = find_runner("cuda")(settings_of(model_dir, torch.bfloat16))
    assert isinstance(runner, CudaRunner)
    exact = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    exact.to(torch.bfloat16).float()
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    r = request([(7 * j) % VOCAB for j in range(20)], 1)
    got = advance(runner, [Row(r, 20)], 0, [])[0].float()
    with torch.inference_mode():
        want, other = (model(torch.tensor([r.tokens])).logits[0, -1].float() for model in (exact, plain))
    assert float((got - want).abs().max()) <= 3 * float((other - want).abs().max()) + 0.02


def test_buckets_cover_every_number_of_rows() -> None:
    assert bucket_sizes(256) == [1, 2, 4, 8, *range(16, 257, 8)]
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]


def test_a_runner_that_computes_other_numbers_is_not_used(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Decoder.advance

    def wrong(self: Decoder, hidden, layers, inputs) -> None:
        real(self, hidden, layers, inputs)
        hidden.added += 0.5

    monkeypatch.setattr(Decoder, "advance", wrong)
    first: list[weakref.ref[object]] = []

    def load(*given: Any) -> Any:
        assert all(model() is None for model in first), "two models would not fit on a GPU"
        model = load_model(*given)
        first.append(weakref.ref(model))
        return model

    opened = open_runner(settings_of(stories_dir), load)
    assert isinstance(opened, TransformersRunner) and len(first) == 2
    assert opened.num_blocks == 128
    (record,) = [r for r in caplog.records if "cuda is not used, and transformers serves" in r.message]
    assert record.levelname == "ERROR" and "apart" in record.reason


def deep_llama(path: Path) -> Path:
    """As many layers as a 7B has, narrow, with drawn weights."""
    return save_random(LlamaConfig(**{**SHAPE, "num_hidden_layers": 32}), path)


def test_rounding_through_many_layers_is_allowed(tmp_path: Path) -> None:
    assert isinstance(find_runner("cuda")(settings_of(deep_llama(tmp_path), torch.bfloat16)), CudaRunner)


@pytest.mark.parametrize("layer", [0, 13, 31])
def test_one_wrong_layer_of_many_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    real = Decoder._attention

    def wrong(self: Decoder, at: Any, qkv: torch.Tensor, inputs: Any) -> torch.Tensor:
        found = real(self, at, qkv, inputs)
        return found.roll(16, -1) if at is self.layers[layer] else found  # each head in the next one's place

    monkeypatch.setattr(Decoder, "_attention", wrong)
    opened = find_runner("cuda")(settings_of(deep_llama(tmp_path), torch.bfloat16))
    assert isinstance(opened, TransformersRunner)


@pytest.mark.parametrize(
    "error", [OutOfResources(300 << 10, 227 << 10, "shared memory"), RuntimeError("PassManager::run failed")]
)
def test_a_kernel_that_a_gpu_can_not_have_is_named(
    stories_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Decoder, "advance", fail)
    assert isinstance(find_runner("cuda")(settings_of(stories_dir)), TransformersRunner)
    (record,) = [r for r in caplog.records if "cuda is not used, and transformers serves" in r.message]
    assert record.levelname == "ERROR" and f"can't be compiled for this GPU: {type(error).__name__}" in record.reason


def test_a_device_that_fails_at_the_start_ends_it(stories_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After such an error nobody else could compute on it either."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Decoder, "advance", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        find_runner("cuda")(settings_of(stories_dir))


def test_captured_steps_that_differ_are_not_used(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Stream):
        def capture(self, work):
            return lambda: None

    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: Broken())
    engine = make_engine(runner="cuda", max_rows=4, chunk_tokens=64)
    assert any("decode steps are not captured" in record.message for record in caplog.records)
    done = engine.submit([1, 20, 21], 4)
    engine.run()
    assert len(engine.outcomes[done].tokens) == 4


class SmallDevice(Stream):
    """Has memory for a first captured work alone."""

    def __init__(self, message: str) -> None:
        self.message, self.captured = message, 0

    def capture(self, work):
        self.captured += 1
        if self.captured > 1:
            raise RuntimeError(self.message)
        return super().capture(work)


def test_a_device_too_small_for_captured_steps_serves_without(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = make_engine(runner="cuda", max_rows=4, chunk_tokens=64)
    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: SmallDevice("CUDA error: out of memory"))
    engine = make_engine(runner="cuda", max_rows=4, chunk_tokens=64)
    (record,) = [record for record in caplog.records if "decode steps are not captured" in record.message]
    assert "fewer node.max_rows" in record.reason
    runner = engine.engine.runner
    assert isinstance(runner, CudaRunner) and not runner.buckets and not runner.prompts and not runner.feeds
    done = [each.submit([1, 20, 21], 6, ignore_eos=True) for each in (engine, wanted)]
    engine.run()
    wanted.run()
    assert engine.results([done[0]]) == wanted.results([done[1]])
    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: SmallDevice("operation not permitted when capturing"))
    with pytest.raises(RuntimeError, match="can't capture decode steps of 4 rows: operation not permitted"):
        make_engine(runner="cuda", max_rows=4, chunk_tokens=64)


def test_another_activation_is_refused(tmp_path: Path) -> None:
    path = save_random(LlamaConfig(**SHAPE, hidden_act="gelu"), tmp_path / "gelu")
    with pytest.raises(ValueError, match="cuda computes silu, not the model's gelu; use transformers"):
        find_runner("cuda")(settings_of(path))


def test_triton_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and a decode step by the kernels, in the interpreter where there is no GPU: the start's own check
    compares them with the model's layers, of which one has a window."""
    monkeypatch.setattr(cuda_layers, "layer_operations", lambda _: TritonOperations())
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    path = save_random(Qwen3Config(**{**SHAPE, "num_hidden_layers": 2}, head_dim=16, **windows), tmp_path / "qwen3")
    opened = find_runner("cuda")(settings_of(path))
    assert isinstance(opened, CudaRunner) and isinstance(opened.decoder.operations, TritonOperations)


# --- the whole engine


class Counting(CudaRunner):
    """Says which passes it was asked for."""

    def start(self, batch: StepBatch, lora: PassLora | None) -> CapturedPass | LayeredPass:
        run = super().start(batch, lora)
        self.passes.append((type(run), batch.n_rows, lora is not None))
        return run


@pytest.fixture
def engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> LocalEngine:
    """Its captured steps run late."""
    stream = SlowStream()
    monkeypatch.setattr(cuda_runner, "open_stream", lambda _: stream)
    monkeypatch.setattr(cuda_runner, "CudaRunner", Counting)
    Counting.passes = []
    made = make_engine(runner="cuda", chunk_tokens=24, max_rows=8, block_tokens=4, adapter_memory=512 << 10)
    assert isinstance(made.engine.runner, CudaRunner)
    stream.late = True
    return made


@settings(max_examples=draws(2), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_tokens_of_peft(seed: int, engine: LocalEngine, drawn_adapters: list[Path], reference: PeftReference) -> None:
    """Mixed adapters, ranks and the base, prompts of several chunks, arrivals while others decode, cold adapters and
    eviction; a request is cancelled."""
    rng = random.Random(seed)
    cases, requests = [], []
    for _ in range(8):
        path = rng.choice([None, *drawn_adapters])
        prompt = [1, *(rng.randrange(3, 512) for _ in range(rng.randrange(60)))]
        case = Case(path, None if path is None else engine.deploy(path), prompt, rng.randint(1, 10))
        cases.append(case)
        requests.append(engine.submit(prompt, case.max_tokens, case.adapter))
        for _ in range(rng.randrange(4)):
            engine.step()
    engine.engine.cancel(requests.pop())
    engine.run()
    assert isinstance(engine.engine.runner.stream, SlowStream) and "wait" in engine.engine.runner.stream.log
    tally = Tally()
    for case, request_id in zip(cases, requests, strict=False):
        assert engine.outcomes[request_id].finished is not None
        assert not check(engine, reference, case, engine.outcomes[request_id].tokens, tally)
    assert tally.mismatches == 0


def test_which_passes_are_captured(engine: LocalEngine, drawn_adapters: list[Path]) -> None:
    adapter = engine.deploy(drawn_adapters[0])
    for _ in range(2):  # the second time the adapter is there
        Counting.passes.clear()
        for i in range(3):
            engine.submit([1, 30 + i, 31], 5, adapter if i else None)
        engine.run()
    decodes = [entry for entry in Counting.passes if entry[0] is CapturedPass]
    assert (CapturedPass, 3, True) in decodes
    prompts = [entry for entry in Counting.passes if entry[0] is PromptPass]
    assert len(decodes) >= 4 and 1 <= len(prompts) <= 2, Counting.passes
    assert len(decodes) + len(prompts) == len(Counting.passes)


@pytest.mark.skipif(not spare_cores(1), reason="a CPU worker needs a core beside the engine's")
def test_rows_whose_adapter_is_on_its_way(
    make_engine: MakeEngine, drawn_adapters: list[Path], reference: PeftReference
) -> None:
    """A CPU worker computes a prompt and decode steps, beside rows of the base, which are captured when they are
    alone; then the adapter arrives."""
    engine = make_engine(runner="cuda", cpu_workers=1, max_rows=4, chunk_tokens=64)
    layers, starts = engine.base.num_layers, engine.engine.cold_start
    starts.plan = lambda lease, n_tokens, ahead: Plan("assist", layers, 0.0, (0.0,) * layers, (1.0,) * layers)
    starts.joining = lambda waiting, others: {lease.digest for lease, _ in waiting if starts.can_step(lease)}
    link = HeldLink(engine)
    path = drawn_adapters[0]
    cases = [Case(None, None, [1, 44, 45], 12), Case(path, engine.deploy(path), [1, *range(50, 70)], 10)]
    requests = [engine.submit(case.prompt, case.max_tokens, case.adapter) for case in cases]
    engine.run(lambda: len(engine.outcomes[requests[1]].tokens) == 4)
    link.open()
    engine.run()
    tally = Tally()
    for case, request_id in zip(cases, requests, strict=True):
        assert not check(engine, reference, case, engine.outcomes[request_id].tokens, tally)
    finished = engine.outcomes[requests[1]].finished
    assert finished is not None and finished.cold_start.layers_cpu >= 4 * layers


SAMPLED = [
    Sampling(temperature=0.8, top_p=0.9, seed=3, logprobs=3),
    Sampling(temperature=1.1, top_k=20, seed=4, repetition_penalty=1.2, presence_penalty=0.4),
    Sampling(temperature=0.0, frequency_penalty=0.5, logit_bias={300: 2.0}, min_tokens=4, bad_words=[[280], [290, 7]]),
    Sampling(temperature=0.7, min_p=0.05, seed=5, prompt_logprobs=2),
    Sampling(temperature=0.0, logprobs=0),
]


def test_sampled_requests_say_what_they_say_elsewhere(
    engine: LocalEngine, make_engine: MakeEngine, drawn_adapters: list[Path]
) -> None:
    """Tokens and log probabilities, with all parameters, of both runners."""
    outcomes = []
    for each in (engine, make_engine(chunk_tokens=24, max_rows=8, block_tokens=4)):
        adapter = each.deploy(drawn_adapters[1])
        requests = [
            each.submit([1, *range(40 + i, 75 + i)], 12, adapter if i % 2 else None, way)
            for i, way in enumerate(SAMPLED)
        ]
        each.run()
        outcomes.append([each.outcomes[r] for r in requests])
    for mine, other in zip(*outcomes, strict=True):
        assert mine.tokens == other.tokens
        assert len(mine.prompt_scores) == len(other.prompt_scores)
        for a, b in zip([*mine.logprobs, *mine.prompt_scores], [*other.logprobs, *other.prompt_scores], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert [token for token, _ in a.top] == [token for token, _ in b.top]
                rank = a.rank or 0
                assert abs(rank - (b.rank or 0)) <= max(2, rank // 50)  # tokens lie closer together further down
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_diverged_rows_end_with_an_error(engine: LocalEngine) -> None:
    runner = engine.engine.runner
    assert isinstance(runner, CudaRunner)
    good = engine.submit([1, 40, 41], 6)
    bad = engine.submit([1, 50, 51], 6)
    engine.step()
    blocks = engine.engine.running[bad].blocks
    for layer in runner.decoder.layers:
        layer.cache.values[blocks[0] * runner.block_tokens] = float("nan")
    engine.run()
    finished = engine.outcomes[bad].finished
    assert finished is not None and finished.error == "the model's output was not finite"
    assert len(engine.outcomes[good].tokens) == 6


def test_auto_takes_the_gpus_runner_for_models_that_it_computes(
    stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, which a CPU stands for here; elsewhere transformers. Another activation is served all the same."""
    assert isinstance(find_runner("auto")(settings_of(stories_dir)), TransformersRunner)
    gelu = save_random(LlamaConfig(**SHAPE, hidden_act="gelu"), tmp_path / "gelu")
    monkeypatch.setattr(auto_runner, "is_gpu", lambda _: True)
    assert isinstance(find_runner("auto")(settings_of(stories_dir)), CudaRunner)
    assert isinstance(find_runner("auto")(settings_of(gelu)), TransformersRunner)
    (record,) = [record for record in caplog.records if "auto takes transformers" in record.message]
    assert "cuda computes silu, not the model's gelu" in record.reason
