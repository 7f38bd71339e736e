"""The environment with the real vLLM, a small base model that it serves, and drawn adapters."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from cluster.messages import Adapter
from tests.support.environments import VLLM, VLLM_PYTHON
from tests.support.peft_reference import PeftReference, draw_adapter, make_adapter
from tests.vllm.vllm_process import VllmProcess

LAYERS, VOCAB = 3, 512
SHAPE = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "vocab_size": VOCAB, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
"""vLLM's attention on a CPU serves no heads narrower than 32."""
ADAPTERS = 12

MakeVllm = Callable[..., VllmProcess]
"""(**settings of VllmProcess) -> VllmProcess, which is not started yet"""


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter of the environment that has vLLM."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"NOT RUN: no vLLM in {VLLM}; make it by `make .engines/vllm`")
    return VLLM_PYTHON


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory, stories_dir: Path) -> Path:
    """A random Llama in fp32 with the tokenizer of stories260K."""
    directory = tmp_path_factory.mktemp("models") / "random-llama"
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    for file in stories_dir.glob("tokenizer*"):
        shutil.copyfile(file, directory / file.name)
    return directory


@pytest.fixture(scope="session")
def adapter_dirs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Drawn adapters of all the forms that are served, rank and alpha patterns among them."""
    root, rng = tmp_path_factory.mktemp("adapters"), random.Random(7)
    return [make_adapter(base, root / f"a{at}", at, **draw_adapter(rng, LAYERS)) for at in range(ADAPTERS)]


@pytest.fixture(scope="session")
def peft(base: Path) -> PeftReference:
    return PeftReference(base)


@pytest.fixture
def make_vllm(python: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeVllm:
    def make(**settings: Any) -> VllmProcess:
        folder = tmp_path_factory.mktemp("node")
        return VllmProcess(python, base, folder / "registry", folder, **settings)

    return make


@pytest.fixture(scope="session")
def vllm(python: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """One process for the tests that leave it whole."""
    folder = tmp_path_factory.mktemp("node")
    with VllmProcess(python, base, folder / "registry", folder) as running:
        yield running


@pytest.fixture(scope="session")
def deployed(vllm: VllmProcess, adapter_dirs: list[Path]) -> list[tuple[Path, Adapter]]:
    return [(directory, vllm.deploy(directory)) for directory in adapter_dirs]
