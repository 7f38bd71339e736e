"""transformers looks for a distribution that provides a package called `kernels`: ours must not confuse it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions


def test_ours_is_the_installed_kernels_package() -> None:
    assert set(packages_distributions()["kernels"]) == {"garnish"}


def test_transformers_still_imports_and_runs_a_model() -> None:
    """In a fresh process, from another directory, so that the installed metadata alone counts."""
    code = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import is_kernels_available
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
out = AutoModelForCausalLM.from_config(config)(input_ids=torch.tensor([[1, 2, 3]]))
print(tuple(out.logits.shape), is_kernels_available())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 3, 32) False"
