"""LightLLM's layers through the runner's seam, against Hugging Face and PEFT in fp32 over the same fp16 weights.

Without a GPU LightLLM's kernels run in Triton's interpreter.
"""

from __future__ import annotations

import gc
import importlib.util
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from adapters.base_model import load_base_model
from adapters.deployment import AdapterUpload
from adapters.open_store import open_store
from adapters.registry import Registry
from cluster.messages import Adapter, Sampling
from node_agent.adapter_memory.store import AdapterStore
from node_agent.config import EngineConfig
from node_agent.engine.batch import build_lora, build_step
from node_agent.engine.request import Request
from node_agent.engine.rows import Row
from node_agent.engine.setup import build_engine
from node_agent.runner.lightllm_device import imported
from node_agent.runner.lightllm_open import open_runner
from node_agent.runner.lora import SegmentedLora
from node_agent.types import GROUPS, PassLora, RunnerSettings
from tests.node_agent.adapter_world import loaded_lease
from tests.support.draws import draws
from tests.support.peft_reference import ALL_TARGETS, PeftReference, make_adapter
from tests.support.random_model import HALF_SHAPE, HALF_TOLERANCE, write_half_llama

if TYPE_CHECKING:
    from node_agent.runner.lightllm_runner import LightllmPass, LightllmRunner

if importlib.util.find_spec("lightllm") is None:
    pytest.skip("lightllm is not installed (make install-dev): its runner is NOT tested", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_interpreter")
VOCAB = 97
SHAPE = {**HALF_SHAPE, "vocab_size": VOCAB}
BLOCK = 4


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[torch.device]:
    """The GPU, or a CPU that passes for one."""
    found = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with imported(found):
        yield found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_half_llama(tmp_path_factory.mktemp("random") / "llama", VOCAB)


class World:
    """A runner, two loaded adapters of different ranks, and the reference."""

    def __init__(self, model_dir: Path, root: Path) -> None:
        from node_agent.runner.lightllm_layers import load_lightllm_model
        from node_agent.runner.lightllm_runner import LightllmRunner

        self.runner: LightllmRunner = LightllmRunner(load_lightllm_model(model_dir, torch.float16), BLOCK, 256)
        self.reference = PeftReference(model_dir)
        base, objects = load_base_model(model_dir), open_store(str(root / "registry"))
        config = EngineConfig(
            model_dir=str(model_dir), base_id="b", registry="", adapter_memory=1 << 20, host_memory=4 << 20
        )
        self.store = AdapterStore(config, objects, base, self.runner.device, torch.float16, lambda: None)
        registry = Registry(objects, base)
        self.adapters: list[tuple[Path | None, Adapter | None]] = [(None, None)]
        for i, rank in enumerate((8, 3)):
            half = {"dtype": torch.float16, "r": rank, "lora_alpha": 2 - i, "target_modules": ALL_TARGETS}
            path = make_adapter(model_dir, root / f"a{i}", i, **half)
            registry.deploy("t", f"a{i}", AdapterUpload((path / "adapter_config.json").read_bytes(), _tensors(path)))
            found = registry.resolve("t", f"a{i}")
            self.adapters.append((path, Adapter(found.digest, found.artifact_key, found.bytes, tuple(found.ranks))))
        self.leases = [None if adapter is None else loaded_lease(self.store, adapter) for _, adapter in self.adapters]

    def request(self, adapter: int, tokens: Sequence[int], place: int) -> Request:
        """`adapter` 0 is the base; `place` chooses blocks of its own, in an order that is not the pool's."""
        made = Request(str(adapter), "t", list(tokens), 99, Sampling(temperature=0), 0.0, None, False)
        made.blocks = list(range(1 + 30 * place, 31 + 30 * place))[::-1]
        made.lease = self.leases[adapter]
        return made

    def start(self, rows: list[Row], n_decode: int) -> LightllmPass:
        """As the engine does."""
        lora = build_lora(rows, self.runner.device)
        adapted = None if lora.empty else SegmentedLora(lora, self.store.weights)
        return self.runner.start(build_step(rows, n_decode, BLOCK, self.runner.device), adapted)

    def end(self, run: LightllmPass, rows: list[Row]) -> list[int]:
        """Advances what is left; every row's logits and token must be PEFT's. Returns the tokens."""
        run.advance(self.runner.num_layers)
        wanted = [row.request for row in rows if row.wants_logits]
        logits = run.logits_of(run.batch.logit_rows).cpu()
        output = run.finish()
        assert not output.non_finite
        for request, got, token in zip(wanted, logits, output.token_ids.tolist(), strict=True):
            want = self.reference.logits(self.adapters[int(request.id)][0], request.tokens, last=1)[0]
            torch.testing.assert_close(got, want, atol=HALF_TOLERANCE, rtol=0)
            best = want.topk(2).values
            assert token == int(want.argmax()) or float(best[0] - best[1]) < 2 * HALF_TOLERANCE
        for row in rows:
            row.request.computed += row.length
        return output.token_ids.tolist()


def _tensors(path: Path) -> Path:
    return path / "adapter_model.safetensors"


@pytest.fixture(scope="module")
def world(model_dir: Path, device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(model_dir, tmp_path_factory.mktemp("world"))
    assert made.runner.device == device
    yield made
    made.store.close()


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_prefill_and_decode_with_another_pass_in_between(world: World) -> None:
    """Two adapters and the base in one batch, stopped after each layer; a second sequence advances meanwhile."""
    requests = [world.request(adapter, prompt(adapter, 5 + 4 * adapter), adapter) for adapter in (2, 1, 0)]
    other = world.request(1, prompt(9, 11), 4)
    rows, others = [Row(r, len(r.tokens)) for r in requests], [Row(other, 11)]
    first, second = world.start(rows, 0), world.start(others, 0)
    first.advance(1)
    second.advance(1)
    tokens = world.end(first, rows)
    other.tokens += world.end(second, others)
    for _ in range(3):
        for request, token in zip(requests, tokens, strict=True):
            request.tokens.append(token)
        rows, others = [Row(r, 1) for r in requests], [Row(other, 1)]
        first, second = world.start(rows, 3), world.start(others, 1)
        first.advance(1)
        other.tokens += world.end(second, others)
        tokens = world.end(first, rows)


def test_adapters_change_what_is_written(world: World) -> None:
    """Otherwise the other tests would prove little of LoRA."""
    ids = prompt(0, 9)
    found = [world.reference.logits(path, ids, last=1) for path, _ in world.adapters]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert float((found[one] - found[two]).abs().max()) > 50 * HALF_TOLERANCE


@settings(max_examples=draws(3), phases=[Phase.explicit, Phase.reuse, Phase.generate])  # slow to shrink in
@given(data=st.data())
def test_drawn_chunks_and_decodes(data: st.DataObject, world: World) -> None:
    """Prompts in drawn chunks, alone or beside decode rows, stopped at drawn layers."""
    adapters = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    requests = [world.request(a, prompt(i, data.draw(st.integers(2, 40))), i) for i, a in enumerate(adapters)]
    for _ in range(4):
        decoding = [r for r in requests if r.decoding]
        chunks = [Row(r, data.draw(st.integers(1, len(r.tokens) - r.computed))) for r in requests if not r.decoding]
        rows = [*(Row(r, 1) for r in decoding), *chunks]
        run = world.start(rows, len(decoding))
        run.advance(data.draw(st.integers(0, 2)))
        wanted = [row.request for row in rows if row.wants_logits]
        for request, token in zip(wanted, world.end(run, rows), strict=True):
            request.tokens.append(token)


class Recorded:
    """Writes down the calls of a PassLora."""

    def __init__(self, inner: PassLora) -> None:
        self.inner = inner
        self.calls: list[tuple[str, int, str]] = []

    def begin(self, layer: int, group: str, x: torch.Tensor) -> bool:
        self.calls.append(("begin", layer, group))
        return self.inner.begin(layer, group, x)

    def finish(self, layer: int, group: str, ys: Sequence[torch.Tensor]) -> None:
        assert len(ys) == len(GROUPS[group])
        self.calls.append(("finish", layer, group))
        self.inner.finish(layer, group, ys)


def test_calls_of_lora(world: World) -> None:
    """One begin and one finish per layer and group, of the pass that has adapters alone."""
    rows, base = [Row(world.request(1, prompt(1, 6), 0), 6)], [Row(world.request(0, prompt(2, 6), 1), 6)]
    recorded = Recorded(SegmentedLora(build_lora(rows, world.runner.device), world.store.weights))
    run = world.runner.start(build_step(rows, 0, BLOCK, world.runner.device), recorded)
    run.advance(1)
    before = list(recorded.calls)
    world.end(world.start(base, 0), base)
    assert recorded.calls == before
    world.end(run, rows)
    assert recorded.calls == [
        (call, layer, group) for layer in (0, 1) for group in GROUPS for call in ("begin", "finish")
    ]


def test_abort_frees_and_harms_no_other(world: World) -> None:
    kept = world.request(2, prompt(4, 10), 0)
    kept.tokens += world.end(world.start([Row(kept, 10)], 0), [Row(kept, 10)])
    run = world.start([Row(world.request(1, prompt(5, 13), 1), 13)], 0)
    run.advance(1)
    assert run.state is not None
    held = [weakref.ref(run.hidden), weakref.ref(run.state.kv_buffer), weakref.ref(run.state.lora)]
    run.abort().synchronize()
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]
    with pytest.raises(RuntimeError, match="ended"):
        run.advance(2)
    world.end(world.start([Row(kept, 1)], 1), [Row(kept, 1)])


def test_a_chunk_without_logits(world: World) -> None:
    run = world.start([Row(world.request(1, prompt(6, 9), 0), 5)], 0)
    run.advance(1)
    with pytest.raises(RuntimeError, match="after 1 of 2 layers"):
        run.finish()
    run.advance(2)
    assert run.finish().token_ids.tolist() == []


def test_tied_embeddings(tmp_path: Path) -> None:
    from node_agent.runner.lightllm_layers import load_lightllm_model
    from node_agent.runner.lightllm_runner import LightllmRunner

    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    model.half().save_pretrained(tmp_path)
    runner = LightllmRunner(load_lightllm_model(tmp_path, torch.float16), BLOCK, 8)
    request = Request("r", "t", prompt(7, 6), 1, Sampling(temperature=0), 0.0, None, False)
    request.blocks = [3, 1]
    run = runner.start(build_step([Row(request, 6)], 0, BLOCK, runner.device), None)
    run.advance(2)
    want = PeftReference(tmp_path).logits(None, request.tokens, last=1)
    torch.testing.assert_close(run.logits_of(run.batch.logit_rows).cpu(), want, atol=HALF_TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("config", "dtype", "problem"),
    [
        (LlamaConfig(**{**SHAPE, "num_attention_heads": 8}), torch.float16, "head_dim 8"),
        (LlamaConfig(**SHAPE, head_dim=32), torch.float16, "head_dim 32"),
        (LlamaConfig(**SHAPE, attention_bias=True), torch.float16, "biases"),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), torch.float16, "gelu"),
        (LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0}), torch.float16, "linear"),
        (MistralConfig(**SHAPE), torch.float16, "mistral"),
        (LlamaConfig(**SHAPE), torch.float32, "float32"),
    ],
)
def test_what_it_would_compute_wrongly_is_refused(
    tmp_path: Path, config: LlamaConfig, dtype: torch.dtype, problem: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"runner lightllm can't serve it: .*{problem}"):
        open_runner(settings_of(tmp_path, dtype))


def settings_of(model_dir: Path, dtype: torch.dtype | None, device: str = "cpu") -> RunnerSettings:
    return RunnerSettings(model_dir, torch.device(device), dtype, BLOCK, lambda _: 8)


def test_the_engine_does_not_start_with_what_it_does_not_know(model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    scaled = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5000.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    LlamaConfig(**SHAPE, rope_parameters=scaled).save_pretrained(tmp_path)
    settings = EngineConfig(
        model_dir=str(tmp_path), base_id="b", registry=str(tmp_path), device="cpu", runner="lightllm", dtype="float16"
    )
    with pytest.raises(ValueError, match="runner lightllm can't serve it: rope_type 'llama3' is not default"):
        build_engine(settings, lambda: None)


def test_the_models_own_dtype_counts_where_none_is_asked_for(model_dir: Path, tmp_path: Path) -> None:
    assert open_runner(settings_of(model_dir, None)).dtype == torch.float16
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"in bfloat16 Triton's interpreter .* wrongly; set dtype: float16"):
            open_runner(settings_of(model_dir, torch.bfloat16))
    LlamaConfig(**SHAPE, dtype="float32").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"float32 is neither float16 nor bfloat16 \(node.dtype sets it\)"):
        open_runner(settings_of(tmp_path, None))


def test_what_is_missing_is_named(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(ValueError, match=r"runner: lightllm's kernels run on a GPU, .* computes on cpu; use auto"):
            open_runner(settings_of(model_dir, None))
    monkeypatch.setattr("node_agent.runner.lightllm_open.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"runner: LightLLM is not installed .* pip install 'garnish\[lightllm\]'"):
        open_runner(settings_of(model_dir, None))
