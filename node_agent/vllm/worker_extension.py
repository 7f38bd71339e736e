"""Extension of vLLM's workers (`worker_extension_cls`): mends LoRA on a CPU, says which adapters a worker holds, and
fills its slots for the check at start. The engine calls its methods by vLLM's `collective_rpc`."""

from __future__ import annotations

import os
from typing import Any, TypedDict

from cluster.lifeline import die_with_parent

NAME = "node_agent.vllm.worker_extension.WorkerExtension"
START_METHOD, ADAPTERS_METHOD, FILL_METHOD = "garnish_start", "garnish_adapters", "garnish_fill"
MEMORY_METHOD = "garnish_memory"
"""Names of the methods."""
MENDED = ("0.32.",)
"""Versions of vLLM whose LoRA functions for a CPU are replaced."""
CHECK_RANK = 8
STRENGTH = 0.25
"""Strength of the adapters of the check. A row that used one by mistake must differ by far more than rounding."""


class WorkerAdapters(TypedDict):
    """Adapters of one worker, by their numbers."""

    slots: list[int]
    """adapters in a slot"""
    host: list[int]
    """adapters in the worker's host memory, which include those in a slot"""


class WorkerMemory(TypedDict):
    """Bytes that one worker has reserved."""

    weights: int
    """parameters of the base model; 0 if vLLM keeps them in another form, as on a CPU"""
    slots: int
    """all slots for adapters together"""


class WorkerExtension:
    """Methods that vLLM adds to its class of workers."""

    model_runner: Any

    def garnish_start(self) -> bool:
        """Binds this process's life to its parent's. Returns whether LoRA functions were replaced."""
        die_with_parent(os.getppid())
        return mend_lora()

    def garnish_adapters(self) -> WorkerAdapters:
        """Returns the adapters that this worker holds."""
        manager = self.model_runner.lora_manager._adapter_manager
        in_slots = [number for number in manager.lora_index_to_id if number is not None]
        return WorkerAdapters(slots=sorted(in_slots), host=sorted(manager.list_adapters()))

    def garnish_memory(self) -> WorkerMemory:
        """Returns the memory that this worker has reserved for the base model and for adapters."""
        modules = self.model_runner.lora_manager._adapter_manager.modules.values()
        stacked = [tensor for module in modules for tensor in (module.lora_a_stacked, module.lora_b_stacked)]
        parameters = [parameter.nbytes for parameter in self.model_runner.model.parameters()]
        return WorkerMemory(
            weights=sum(parameters) if all(parameters) else 0,  # of packed weights an empty parameter is left
            slots=sum(tensor.nbytes for weights in stacked for tensor in _tensors(weights)),
        )

    def garnish_fill(self, first: int) -> int:
        """Fills all slots with random adapters, whose numbers begin at `first`. Returns the number of slots."""
        import torch

        outer = self.model_runner.lora_manager
        manager, generator = outer._adapter_manager, torch.Generator().manual_seed(first)
        adapter = manager.create_dummy_lora(
            first, min(CHECK_RANK, outer.lora_config.max_lora_rank), outer.embedding_modules
        )
        for layer in adapter.loras.values():
            if not isinstance(layer.scaling, list):
                layer.scaling = 1  # as of packed layers
            for tensor in _tensors(layer.lora_a):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
            for tensor in _tensors(layer.lora_b):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * STRENGTH)
        slots: int = manager.lora_slots
        for number in range(first, first + slots):
            manager.add_adapter(adapter.clone(number))
            manager.activate_adapter(number)
        return slots


def mend_lora() -> bool:
    """Replaces vLLM's LoRA functions where this version has them wrong. Returns whether it did."""
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not vllm.__version__.startswith(MENDED):
        return False
    from vllm.lora.ops import torch_ops
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    from node_agent.vllm import cpu_lora

    for function in (cpu_lora.bgmv_shrink, cpu_lora.bgmv_expand, cpu_lora.bgmv_expand_slice):
        for module in (lora_ops, torch_ops, punica_cpu):
            setattr(module, function.__name__, function)
    return True


def _tensors(weights: Any) -> list[Any]:
    """Returns the tensors of a layer, which may be one, or several of which some are None."""
    return [each for each in weights if each is not None] if isinstance(weights, list | tuple) else [weights]
