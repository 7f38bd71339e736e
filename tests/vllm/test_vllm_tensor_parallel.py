"""Two ranks on the CPU: PEFT's tokens, slots that agree on both ranks, and the end when one rank dies."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.support.peft_reference import PeftReference, make_adapter
from tests.support.processes import processes
from tests.vllm.conftest import SHAPE
from tests.vllm.test_vllm_races import agrees
from tests.vllm.vllm_process import VllmProcess, assert_ended, name_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPTS = [[5, 17, 301, 44], [9, 8, 7], [400, 3, 77, 12, 90, 5]]
TOKENS = 16


@pytest.fixture
def wide_base(tmp_path: Path, stories_dir: Path) -> Path:
    """A base whose heads and key-value heads can be cut in two."""
    torch.manual_seed(5)
    shape: dict[str, Any] = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "wide-llama")
    for file in stories_dir.glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / "wide-llama" / file.name)
    return tmp_path / "wide-llama"


def workers(vllm: VllmProcess) -> list[int]:
    known = processes()
    return [pid for pid in vllm.tree if pid in known and name_of(pid).startswith("VLLM::Worker")]


def assert_ranks_meet_in_shared_memory(vllm: VllmProcess) -> None:
    """So that `assert_ended` sees whether that memory is removed."""
    assert [path for path in vllm.shared_memory if "cpushm" in path.name], vllm.shared_memory


def test_two_ranks_give_pefts_tokens_and_end_together(python: Path, wide_base: Path, tmp_path: Path) -> None:
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    directories = [
        make_adapter(wide_base, tmp_path / "a0", 1, r=8, lora_alpha=16, target_modules=every),
        make_adapter(wide_base, tmp_path / "a1", 2, r=4, lora_alpha=4, target_modules=["q_proj", "o_proj"]),
        make_adapter(wide_base, tmp_path / "a2", 3, r=16, lora_alpha=8, target_modules=every, use_rslora=True),
    ]
    peft = PeftReference(wide_base)
    settings = {"tensor_parallel_size": 2, "answer_s": 30.0}
    with VllmProcess(python, wide_base, tmp_path / "registry", tmp_path, **settings) as vllm:
        assert len(workers(vllm)) == 2
        assert_ranks_meet_in_shared_memory(vllm)
        deployed = [(None, None), *((directory, vllm.deploy(directory)) for directory in directories)]
        calls = [
            (directory, prompt, vllm.submit(prompt, TOKENS, adapter))
            for prompt in PROMPTS
            for directory, adapter in deployed
        ]
        for directory, prompt, request in calls:
            tokens = vllm.finish(request, 300).tokens
            assert len(tokens) == TOKENS and agrees(tokens, peft.greedy(directory, prompt, TOKENS))
        vllm.wait_for_checks(2)
        assert not vllm.errors(), "both ranks hold what the node's books say"
        vllm.submit(PROMPTS[0], 300)
        os.kill(workers(vllm)[1], signal.SIGKILL)
        assert_ended(vllm)


def test_two_ranks_that_are_stopped_leave_nothing(python: Path, wide_base: Path, tmp_path: Path) -> None:
    with VllmProcess(python, wide_base, tmp_path / "registry", tmp_path, tensor_parallel_size=2) as vllm:
        assert_ranks_meet_in_shared_memory(vllm)
        vllm.process.terminate()
        assert_ended(vllm, code=0)
        assert not vllm.errors()
