"""Which code adds adapters to an engine's passes: the runner's own, where it sends batches to the device itself."""

from __future__ import annotations

from node_agent.adapter_memory.store import AdapterStore
from node_agent.engine.limits import Limits
from node_agent.runner.lora_choice import StartLora, choose_lora
from node_agent.types import ModelRunner, SendingRunner


def open_lora(limits: Limits, runner: ModelRunner, store: AdapterStore) -> StartLora:
    """Called once, before the first adapter is loaded."""
    if isinstance(runner, SendingRunner):
        return runner.serve(
            store, max_rows=limits.max_rows, chunk_tokens=limits.chunk_tokens, max_context=limits.max_context
        )
    return choose_lora(store, limits.max_rows, limits.chunk_tokens)
