"""What the serving study compares is comparable: padded adapters compute the same, bytes and ratios are right."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from adapters.base_model import load_base_model
from benchmarks.common.latency import Sample
from benchmarks.engine.in_process import TARGETS, Workload, run_engine, shared_steps
from benchmarks.serve.batches import adapter_bytes, figures_of, read_bandwidth
from benchmarks.serve.over_http import complete
from benchmarks.serve.serve import make_random_llama, parse
from tests.support.draws import draws
from tests.support.local_engine import LocalEngine, Outcome
from tests.support.peft_reference import make_adapter, pad_adapter


@settings(max_examples=draws(20))
@given(
    rank=st.integers(1, 9),
    more=st.integers(0, 20),
    alpha=st.sampled_from([1, 8, 12.5]),
    seed=st.integers(0, 1 << 16),
)
def test_padding_changes_no_product(
    tmp_path_factory: pytest.TempPathFactory, rank: int, more: int, alpha: float, seed: int
) -> None:
    root = tmp_path_factory.mktemp("padded")
    source, generator = root / "source", torch.Generator().manual_seed(seed)
    source.mkdir()
    (source / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": alpha, "peft_type": "LORA"}))
    a, b = torch.randn(rank, 6, generator=generator), torch.randn(5, rank, generator=generator)
    save_file({"x.lora_A.weight": a, "x.lora_B.weight": b}, source / "adapter_model.safetensors")
    padded = pad_adapter(source, root / "out", rank + more)
    config = json.loads((padded / "adapter_config.json").read_text())
    tensors = load_file(padded / "adapter_model.safetensors")
    assert (config["r"], config["peft_type"]) == (rank + more, "LORA")
    assert tensors["x.lora_A.weight"].shape == (rank + more, 6)
    assert tensors["x.lora_B.weight"].shape == (5, rank + more)
    scale = config["lora_alpha"] / config["r"]
    torch.testing.assert_close(tensors["x.lora_B.weight"] @ tensors["x.lora_A.weight"] * scale, b @ a * (alpha / rank))


def test_padded_adapters_write_the_same(stories_dir: Path, tmp_path: Path) -> None:
    """In the engine, fp32, in one batch of several ranks; and they take as many bytes as the study says."""
    ranks = (2, 8, 16)
    paths = [
        make_adapter(stories_dir, tmp_path / f"a{r}", r, r=r, lora_alpha=2 * r, target_modules=TARGETS) for r in ranks
    ]
    padded = [pad_adapter(path, tmp_path / f"p{path.name}", 16) for path in paths]
    engine = LocalEngine(stories_dir, tmp_path / "registry", dtype="float32", threads=1, kv_memory=32 << 20)
    written = []
    for directories in (paths, padded):
        adapters = [engine.deploy(path) for path in directories]
        requests = [engine.submit([1, 300 + i], 20, adapter, ignore_eos=True) for i, adapter in enumerate(adapters)]
        engine.run()
        written.append(engine.results(requests))
    assert written[0] == written[1]
    assert written[0][0] != written[0][1]
    engine.assert_clean()
    engine.close()
    for directories, counted in ((paths, ranks), (padded, (16, 16, 16))):
        files = [load_file(path / "adapter_model.safetensors") for path in directories]
        size = sum(tensor.nbytes for file in files for tensor in file.values())
        assert adapter_bytes(load_base_model(stories_dir), counted, 4) == size


def test_a_step_is_one_in_which_all_decode(stories_dir: Path, tmp_path: Path) -> None:
    early = Outcome(tokens=[1] * 4, times=[1.0, 2.0, 4.0, 7.0])
    late = Outcome(tokens=[1] * 4, times=[2.0, 4.0, 7.0, 11.0])
    assert shared_steps([early, late]) == [2.0, 4.0, 7.0]
    assert shared_steps([early, Outcome(times=[8.0])]) == []
    engine = LocalEngine(stories_dir, tmp_path / "registry", dtype="float32", threads=1, kv_memory=32 << 20)
    workload = Workload("base_2", (None, None))
    found = run_engine(engine, [], workload, [[1, 300], [1, 301]], 5)
    assert found.step is not None and found.step > 0
    assert run_engine(engine, [], workload, [[1, 300], [1, 301]], 1).step is None
    engine.close()


def _peer(kind: str, dtype: str, tok_s: float) -> dict[str, float]:
    return {f"peft_{kind}_{dtype}_{unit}": tok_s for unit in ("tok_s", "ttft_ms", "step_ms")}


def test_figures() -> None:
    """The middle round of three decides, and the worst is shown; PEFT counts in the dtype that is faster over all."""

    def row(index: int, mixed_step: float, peft_mixed: float) -> dict[str, float]:
        return {
            "round": index, "read_gb_s": 10.0, "base_step_ms": 20.0, "mixed_step_ms": mixed_step,
            "padded_step_ms": 60.0, "base_tok_s": 30.0, "mixed_tok_s": 20.0,
            **_peer("base", "bfloat16", 9.0), **_peer("base", "float32", 15.0),
            **_peer("mixed", "bfloat16", peft_mixed), **_peer("mixed", "float32", 4.5),
        }  # fmt: skip

    found = figures_of([row(0, 24.0, 10.0), row(1, 30.0, 4.0), row(2, 22.0, 5.0)], weight_bytes=20_000_000)
    # 20 MB at 10 GB/s take 2 ms; the steps are longer by 4, 10 and 2 ms.
    assert found["added_step_over_floor"] == pytest.approx(2.0)
    assert found["added_step_over_floor_max"] == pytest.approx(5.0)
    assert (found["over_peft"], found["over_peft_min"]) == (4.0, 2.0)
    assert (found["over_peft_static_base"], found["padded_over_mixed_step"]) == (2.0, 2.5)
    assert found["mixed_step_ms"] == 24.0
    assert "round" not in found


def test_read_bandwidth_is_of_the_buffer() -> None:
    assert 0 < read_bandwidth(torch.ones(1 << 16)) < math.inf


def test_the_random_model_has_the_shape(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = load_file(make_random_llama(tmp_path / "a", layers=1, seed=3) / "model.safetensors")
    again = load_file(make_random_llama(tmp_path / "b", layers=1, seed=3) / "model.safetensors")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    base = load_base_model(tmp_path / "a")
    assert (base.num_layers, base.hidden_size, base.vocab_size) == (1, 768, 50_257)
    assert base.widths[:4] == ((768, 768),) * 4
    assert "lm_head.weight" not in first, "not tied"
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}


def test_incomplete_requests_are_no_measurement() -> None:
    whole = Sample("a", output_tokens=4)
    assert complete([whole, whole], 4) == [whole, whole]
    with pytest.raises(RuntimeError, match="of b got 3 of 4 tokens"):
        complete([whole, Sample("b", output_tokens=3)], 4)
    with pytest.raises(RuntimeError, match="429"):
        complete([Sample("b", error="429")], 4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--url", "http://a"], "--models"),
        (["--url", "a", "--models", "x"], "--url"),
        (["--url", "http://a", "--models", "x", "--rate", "1", "--concurrency", "2"], "not allowed with"),
        (["--url", "http://a", "--models", "x", "--rate", "nan"], "above 0"),
        (["--url", "http://a", "--models", "x", "--requests", "0"], "below 1"),
    ],
)
def test_wrong_usage(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(given)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err
