"""Opens LightLLM's runner, or says what is missing; where Triton interprets, on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from node_agent.runner.lora_choice import interprets_triton
from node_agent.types import RunnerSettings

if TYPE_CHECKING:
    from node_agent.runner.lightllm_layers import LightllmModel
    from node_agent.runner.lightllm_runner import LightllmRunner

LoadLightllm = Callable[[Path, torch.dtype | None], "LightllmModel"]
"""Puts the model that lies in a directory on the device, in its own or another dtype."""


def open_runner(settings: RunnerSettings, load: LoadLightllm | None = None) -> LightllmRunner:
    """An OpenRunner. `load`: instead of reading the weights of the directory. Raises ValueError when LightLLM is not
    installed, needs a GPU, or can't serve this base model."""
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


class OnCpu(TorchFunctionMode):
    """Answers what LightLLM asks of "cuda" with the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """In which LightLLM computes on the device, although it names a GPU."""
    return nullcontext() if device.type == "cuda" else OnCpu()


@contextmanager
def imported(device: torch.device) -> Iterator[None]:
    """In which LightLLM can be imported and computes: without a GPU its import asks for the name of one."""
    with ExitStack() as stack:
        if device.type != "cuda":
            ask: Any = torch.cuda.get_device_name
            stack.callback(setattr, torch.cuda, "get_device_name", ask)
            torch.cuda.get_device_name = lambda *_: "none"
        stack.enter_context(on_device(device))
        yield
