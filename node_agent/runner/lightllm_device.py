"""Lets LightLLM, whose code names a GPU, compute on the node's device: a CPU if Triton interprets its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Replaces the device "cuda" by the CPU in all calls of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which LightLLM computes on `device`."""
    return nullcontext() if device.type == "cuda" else OnCpu()


@contextmanager
def imported(device: torch.device) -> Iterator[None]:
    """Context in which LightLLM can be imported and computes on `device`. Without a GPU, replaces torch's query of its
    name, which the import needs."""
    with ExitStack() as stack:
        if device.type != "cuda":
            ask: Any = torch.cuda.get_device_name
            stack.callback(setattr, torch.cuda, "get_device_name", ask)
            torch.cuda.get_device_name = lambda *_: "none"
        stack.enter_context(on_device(device))
        yield
