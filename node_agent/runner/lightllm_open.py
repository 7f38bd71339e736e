"""Opens LightLLM's runner on a GPU, or on a CPU if Triton interprets. It can be imported without LightLLM."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from node_agent.runner.lightllm_device import imported
from node_agent.runner.lora_choice import interprets_triton
from node_agent.types import RunnerSettings

if TYPE_CHECKING:
    from node_agent.runner.lightllm_layers import LightllmModel
    from node_agent.runner.lightllm_runner import LightllmRunner

LoadLightllm = Callable[[Path, torch.dtype | None], "LightllmModel"]
"""Loads the model of a directory to the device; dtype None: the model's."""


def open_runner(settings: RunnerSettings, load: LoadLightllm | None = None) -> LightllmRunner:
    """Opens the runner, as an OpenRunner. `load`: replaces `load_lightllm_model`.

    Raises ValueError if LightLLM is not installed, needs a GPU, or can't serve this base model.
    """
    if find_spec("lightllm") is None:
        raise ValueError("runner: LightLLM is not installed on this node; pip install 'garnish[lightllm]'")
    if settings.device.type != "cuda" and not interprets_triton():
        raise ValueError(
            f"runner: lightllm's kernels run on a GPU, and this node computes on {settings.device.type}; use auto"
        )
    with imported(settings.device):
        from node_agent.runner.lightllm_layers import load_lightllm_model
        from node_agent.runner.lightllm_runner import LightllmRunner

        model = (load or load_lightllm_model)(settings.model_dir, settings.dtype)
        if settings.device.type != "cuda" and model.data_type is torch.bfloat16:
            raise ValueError(
                "runner: in bfloat16 Triton's interpreter computes lightllm's kernels wrongly; set dtype: float16"
            )
        return LightllmRunner(model, settings.block_tokens, settings.num_blocks(model.data_type))
