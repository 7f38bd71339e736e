"""Which code adds a pass's LoRA: Triton on a GPU; on a CPU the compiled operator, or torch where it can't be had."""

from __future__ import annotations

from collections.abc import Callable

from node_agent.adapter_memory.store import AdapterStore
from node_agent.runner.lora import SegmentedLora, compiled_lora
from node_agent.types import LoraBatch, PassLora

StartLora = Callable[[LoraBatch, bool], PassLora]
"""(batch, whether every row has one token) -> the pass's LoRA"""


def choose_lora(store: AdapterStore, max_rows: int, chunk_tokens: int) -> StartLora:
    """Returns the code that adds LoRA to passes of at most `max_rows` sequences and `chunk_tokens` prompt tokens."""
    table, pool, base = store.table, store.pool.data, store.base
    if pool.device.type == "cuda":
        from node_agent.runner.triton_lora import TritonLora  # a host without a GPU need not load Triton

        return TritonLora(table, pool, base, store.weights, max_rows, max(max_rows, chunk_tokens)).start
    compiled = compiled_lora(table, pool, base)
    return lambda batch, _: SegmentedLora(batch, store.weights, compiled)
