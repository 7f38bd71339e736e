"""`node.runner: auto`: the `cuda` runner for models that it can compute on a GPU, else `transformers`."""

from __future__ import annotations

import logging

import torch

from node_agent.runner import cuda_runner, transformers_runner
from node_agent.runner.transformers_runner import LoadModel, load_model
from node_agent.types import ModelRunner, RunnerSettings

log = logging.getLogger(__name__)


def open_runner(settings: RunnerSettings, load: LoadModel = load_model) -> ModelRunner:
    """Opens the base model's runner (an OpenRunner). `load` loads the model to the device."""
    if is_gpu(settings.device):
        try:
            return cuda_runner.open_runner(settings, load)
        except ValueError as error:  # the model's memory is free again after this block
            reason = str(error)
        log.warning("node.runner: auto uses transformers", extra={"reason": reason})
    return transformers_runner.open_runner(settings, load)


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
