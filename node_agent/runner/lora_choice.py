"""Chooses the code of a pass's LoRA: Triton on a GPU; on a CPU the compiled operator, or torch without a compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.limits import Limits
from node_agent.runner.lora import SegmentedLora, compiled_lora
from node_agent.sending_runner import SendingRunner
from node_agent.types import LoraBatch, ModelRunner, PassLora

StartLora = Callable[[LoraBatch, bool], PassLora]
"""Function (batch, True if all rows have one token) that returns the LoRA of a pass."""

TRITON_KERNELS = ("mbgmv", "bgmv")
"""Triton kernels for decode rows; on a GPU, `auto` is the first one."""
CPU_KERNEL = "cpu"


@dataclass(frozen=True)
class LoraCode:
    """Code that computes a pass's LoRA."""

    kernel: str
    """name of the kernel for decode rows in performance models: mbgmv, bgmv or cpu"""
    start: StartLora


def kernel_of(name: str, device: torch.device) -> str:
    """Returns the name of the LoRA kernel for decode rows: mbgmv, bgmv or CPU_KERNEL. `name`: value of
    `node.lora_kernel`. Raises ValueError for an unknown name, and for a Triton kernel on a CPU, unless Triton
    interprets."""
    if name == "auto":
        return TRITON_KERNELS[0] if device.type == "cuda" else CPU_KERNEL
    if name not in TRITON_KERNELS:
        raise ValueError(f"lora_kernel: {name!r} is unknown; use auto, {', '.join(TRITON_KERNELS)}")
    if device.type != "cuda" and not interprets_triton():
        raise ValueError(f"lora_kernel: {name} runs on a GPU, and this node computes on {device.type}; use auto")
    return name


def interprets_triton() -> bool:
    """True if Triton runs kernels in its interpreter, on a CPU, for tests; it is about a thousand times slower."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_lora(limits: Limits, runner: ModelRunner, store: AdapterStore, kernel: str) -> LoraCode:
    """Returns the code of LoRA for passes within the limits. Call it once, before the first adapter is loaded.

    A SendingRunner, which copies batches to the device itself, has its own code. `kernel`: a result of `kernel_of`.
    """
    max_rows, chunk_tokens = limits.max_rows, limits.chunk_tokens
    if isinstance(runner, SendingRunner):
        start = runner.serve(
            store, kernel, max_rows=max_rows, chunk_tokens=chunk_tokens, max_context=limits.max_context
        )
        return LoraCode(kernel, start)
    if kernel != CPU_KERNEL:
        from node_agent.runner.triton_lora import TritonLora  # a host without a GPU need not load Triton

        return LoraCode(kernel, TritonLora(store, max_rows, max(max_rows, chunk_tokens), kernel=kernel).start)
    compiled = compiled_lora(store.table, store.pool.data, store.base)
    return LoraCode(kernel, lambda batch, _: SegmentedLora(batch, store.weights, compiled))
