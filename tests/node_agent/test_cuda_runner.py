"""`node.runner: cuda` on a CPU: its logits against those of the untouched model, and its checks at the start."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from triton.runtime.errors import OutOfResources

from cluster.messages import Sampling
from kernels.gpu_triton import TritonOperations
from node_agent.engine.batch import build_step
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.setup import find_runner
from node_agent.runner import auto_runner, cuda_layers, cuda_runner
from node_agent.runner.cuda_decode import bucket_sizes
from node_agent.runner.cuda_layers import Decoder
from node_agent.runner.cuda_pass import LayeredPass
from node_agent.runner.cuda_runner import CudaRunner, open_runner
from node_agent.runner.cuda_stream import Stream
from node_agent.runner.transformers_runner import TransformersRunner, load_model
from node_agent.types import RunnerSettings
from tests.support.draws import draws
from tests.support.local_engine import MakeEngine

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
    (record,) = [r for r in caplog.records if "transformers serves, because cuda can't be used" in r.message]
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
    (record,) = [r for r in caplog.records if "transformers serves, because cuda can't be used" in r.message]
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
    assert any("decode steps run without a CUDA graph" in record.message for record in caplog.records)
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
    (record,) = [record for record in caplog.records if "decode steps run without a CUDA graph" in record.message]
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


def test_auto_takes_the_gpus_runner_for_models_that_it_computes(
    stories_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a GPU, which a CPU stands for here; elsewhere transformers. Another activation is served all the same."""
    assert isinstance(find_runner("auto")(settings_of(stories_dir)), TransformersRunner)
    gelu = save_random(LlamaConfig(**SHAPE, hidden_act="gelu"), tmp_path / "gelu")
    monkeypatch.setattr(auto_runner, "is_gpu", lambda _: True)
    assert isinstance(find_runner("auto")(settings_of(stories_dir)), CudaRunner)
    assert isinstance(find_runner("auto")(settings_of(gelu)), TransformersRunner)
    (record,) = [record for record in caplog.records if "auto uses transformers" in record.message]
    assert "cuda computes silu, not the model's gelu" in record.reason
