"""Has LightLLM, which names a GPU, compute on the node's device; where Triton interprets, that is a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


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
