"""The runner's logits against the untouched Hugging Face model, over architectures, chunk borders and batches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from adapters.base_model import load_base_model
from adapters.base_sizes import sizes_from_config
from cluster.messages import Sampling
from kernels.product import ProductOperator
from node_agent.config import RUNNERS
from node_agent.engine.batch import build_step
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.setup import find_runner
from node_agent.runner.products import Products, can_pack
from node_agent.runner.projections import FusedProjection
from node_agent.runner.transformers_runner import TransformersRunner, load_model, open_runner
from tests.support.draws import draws

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, head_dim=16, attention_bias=True),
    "llama-mha": LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=7, head_dim=10),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 or name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.15)
    path = tmp_path_factory.mktemp("random") / request.param
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["compiled", "torch"])
def pair(request: pytest.FixtureRequest, model_dir: Path) -> tuple[TransformersRunner, torch.nn.Module]:
    """With the compiled operators, and as it is where there is no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv("PATH", "")
        model = load_model(model_dir, torch.device("cpu"), torch.float32)
        runner = TransformersRunner(model, block_tokens=4, num_blocks=128)
    assert (runner.heads is None) == (request.param == "torch")
    return runner, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def request(tokens: list[int], first_block: int) -> Request:
    made = Request("r", "t", tokens, 1, Sampling(temperature=0), 0.0, None, False)
    made.blocks = list(range(first_block, first_block + 30))
    return made


def advance(runner: TransformersRunner, rows: list[Row], n_decode: int, stops: list[int]) -> torch.Tensor:
    """Run one pass, stopping between layers at `stops`; returns the logits of rows that are complete."""
    run = runner.start(build_step(rows, n_decode, runner.block_tokens, runner.device), None)
    for layer in [*stops, runner.num_layers]:
        run.advance(layer)
    logits = run.logits()
    for row in rows:
        row.request.computed += row.length
    return logits


WAYS = {
    "packed": Products(True, 0, False, None),
    "few": Products(False, 64, False, ProductOperator()),
    "widened": Products(False, 0, True, None),
    "both": Products(False, 3, True, ProductOperator()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_bf16_products(way: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decode steps in bf16 are as close to the fp32 model's logits as Hugging Face's own bf16 is."""
    if way == "packed" and not can_pack():
        pytest.skip("oneDNN does not multiply bf16 on this processor")
    monkeypatch.setattr("node_agent.runner.transformers_runner.choose_products", lambda _: WAYS[way])
    runner = TransformersRunner(load_model(model_dir, torch.device("cpu"), torch.bfloat16), 4, 128)
    assert runner.products is WAYS[way]
    exact = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    exact.to(torch.bfloat16).float()  # the weights that the runner has
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
    requests = [request([(7 * i + j) % VOCAB for j in range(5 + 9 * i)], 1 + 30 * i) for i in range(4)]
    for step in range(3):
        rows = [Row(r, len(r.tokens) - r.computed) for r in requests]
        got = advance(runner, rows, len(requests) if step else 0, [1])
        for i, r in enumerate(requests):
            with torch.inference_mode():
                want, other = (model(torch.tensor([r.tokens])).logits[0, -1].float() for model in (exact, plain))
            spread = float((other - want).abs().max())
            assert float((got[i].float() - want).abs().max()) <= 3 * spread + 0.02
            r.tokens.append(int(want.argmax()))


@settings(max_examples=draws(12))
@given(data=st.data())
def test_chunks_and_decodes_equal_the_whole(
    data: st.DataObject, pair: tuple[TransformersRunner, torch.nn.Module]
) -> None:
    """Several sequences, prefilled in drawn chunks together and then decoded together, give the model's own logits."""
    runner, model = pair
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=40), min_size=1, max_size=4))
    requests = [request(prompt[:], 1 + 30 * i) for i, prompt in enumerate(prompts)]
    borders = [data.draw(st.integers(1, len(prompt) - 1)) for prompt in prompts]
    stops = sorted(data.draw(st.lists(st.integers(0, runner.num_layers), max_size=2)))
    for r, border in zip(requests, borders, strict=True):  # each alone up to its border
        step = data.draw(st.integers(1, border))
        while r.computed < border:
            batch = build_step([Row(r, min(step, border - r.computed))], 0, 4, runner.device)
            run = runner.start(batch, None)
            run.advance(runner.num_layers)
            r.computed += batch.n_tokens
    rest = [Row(r, len(r.tokens) - r.computed) for r in requests]
    got = advance(runner, rest, 0, stops)  # the remainders in one mixed pass
    with torch.inference_mode():
        for i, r in enumerate(requests):
            want = model(torch.tensor([r.tokens])).logits[0, -1]
            torch.testing.assert_close(got[i], want, atol=1e-4, rtol=1e-4)
            r.tokens.append(int(want.argmax()))
        got = advance(runner, [Row(r, 1) for r in requests], len(requests), stops)
        for i, r in enumerate(requests):
            want = model(torch.tensor([r.tokens])).logits[0, -1]
            torch.testing.assert_close(got[i], want, atol=1e-4, rtol=1e-4)


def test_decode_beside_a_chunk(pair: tuple[TransformersRunner, torch.nn.Module]) -> None:
    runner, model = pair
    old, new = request([5, 6, 7, 8, 9, 10, 11, 12], 1), request([20, 21, 22, 23, 24], 40)
    advance(runner, [Row(old, 8)], 0, [])
    old.tokens.append(13)
    got = advance(runner, [Row(old, 1), Row(new, 5)], 1, [1])
    with torch.inference_mode():
        for i, r in enumerate((old, new)):
            torch.testing.assert_close(got[i], model(torch.tensor([r.tokens])).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_kv_bytes_are_what_is_allocated(model_dir: Path, pair: tuple[TransformersRunner, torch.nn.Module]) -> None:
    runner, per_token = pair[0], load_base_model(model_dir).kv_elements * torch.float32.itemsize
    allocated = sum(t.numel() * t.element_size() for t in [*runner.keys, *runner.values])
    assert allocated == per_token * runner.block_tokens * runner.num_blocks


def test_parameters_are_counted_as_the_model_has_them(
    model_dir: Path, pair: tuple[TransformersRunner, torch.nn.Module]
) -> None:
    held = sum(parameter.numel() for parameter in pair[1].parameters())
    sizes = sizes_from_config(json.loads((model_dir / "config.json").read_text()))
    assert sizes.linear + sizes.rest == held


def test_finish_before_the_last_layer_is_refused(pair: tuple[TransformersRunner, torch.nn.Module]) -> None:
    runner = pair[0]
    run = runner.start(build_step([Row(request([4, 5], 1), 2)], 0, 4, runner.device), None)
    run.advance(1)
    with pytest.raises(RuntimeError, match="after 1 of 3 layers"):
        run.finish()


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="gpt2"):
        load_model(tmp_path, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_neighbours_is_refused(tmp_path: Path, rope: str) -> None:
    """One batch has one set of frequencies: with these, a long request would change what a short one writes."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    parameters = {"rope_type": rope, "factor": 2.0, "rope_theta": 10000.0, **(factors if rope == "longrope" else {})}
    LlamaConfig(**SHAPE, head_dim=16, rope_parameters=parameters).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rope):
        load_model(tmp_path, torch.device("cpu"), torch.float32)


def test_runners_are_found_by_name() -> None:
    assert all(callable(find_runner(name)) for name in RUNNERS)
    assert find_runner("transformers") is open_runner
    with pytest.raises(ValueError, match="runner: 'other' is unknown; use auto, transformers, cuda"):
        find_runner("other")


def test_a_pass_keeps_no_activations(pair: tuple[TransformersRunner, torch.nn.Module]) -> None:
    runner = pair[0]
    advance(runner, [Row(request([4, 5, 6], 1), 3)], 0, [])
    held = [m.parts for layer in runner.layers for m in layer.modules() if isinstance(m, FusedProjection)]
    assert len(held) == 4 * runner.num_layers
    assert not any(held)
