"""Which code adds adapters to an engine's passes: the runner's own, where it sends batches to the device itself."""

from __future__ import annotations

from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.limits import Limits
from node_agent.runner.lora_choice import LoraCode, choose_lora
from node_agent.types import ModelRunner, SendingRunner


def open_lora(limits: Limits, runner: ModelRunner, store: AdapterStore, kernel: str) -> LoraCode:
    """Called once, before the first adapter is loaded. `kernel`: what `kernel_of` returned."""
    sizes = {"max_rows": limits.max_rows, "chunk_tokens": limits.chunk_tokens}
    if isinstance(runner, SendingRunner):
        return LoraCode(kernel, runner.serve(store, kernel, max_context=limits.max_context, **sizes))
    return choose_lora(store, kernel, **sizes)
