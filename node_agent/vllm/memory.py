"""Device memory of a node with vLLM, planned before vLLM starts: its weights, its slots for adapters, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapters.base_sizes import ITEM_BYTES, BaseSizes, dtype_of, quantised_bits
from cluster.device_memory import DeviceMemory, MemoryTarget, NoRoom, plan_memory
from node_agent.config import VllmConfig
from node_agent.vllm.arguments import AUTO, DEFAULTS

RUNTIME = 1 << 30
"""Bytes for libraries, activations and captured graphs."""
CPU_SLOTS = 4
"""Slots on a CPU with `max_loras: auto`: other processes share the host's memory."""
CPU_KV_BYTES = 1 << 30
"""Bytes of the KV cache on a CPU, unless the service file states another size."""
MIN_KV_TOKENS = 8192
"""Tokens of the KV cache that are the minimum where vLLM chooses the longest context by itself."""
WIDE_KV_CACHES = ("auto", "float16", "bfloat16", "float32")
"""Values of `kv_cache_dtype` with which an element is as large as one of the model. Others store one byte."""


def plan_node(
    sizes: BaseSizes,
    config: Mapping[str, Any],
    vllm: VllmConfig,
    *,
    device: int,
    dtype: str = "auto",
    kv_memory: int | None = None,
    max_rows: int = 0,
    on_cpu: bool = False,
) -> DeviceMemory:
    """Returns how a node with vLLM divides each of its devices, which have `device` bytes. `config`: the base model's
    config.json. `dtype`, `kv_memory` and `max_rows`: settings of the node.

    Raises NoRoom, with the sum and what to change, if it does not fit.
    """
    arguments = DEFAULTS | vllm.arguments
    itemsize = ITEM_BYTES.get(dtype, min(2, ITEM_BYTES.get(dtype_of(config), 2)))  # vLLM halves float32 by itself
    devices, stages = int(arguments.get("tensor_parallel_size", 1)), int(arguments.get("pipeline_parallel_size", 1))
    divided = bool(arguments.get("fully_sharded_loras"))
    per_token = sizes.kv * (itemsize if arguments.get("kv_cache_dtype", "auto") in WIDE_KV_CACHES else 1)
    slots, rows = arguments["max_loras"], max_rows or int(arguments["max_num_seqs"])
    if on_cpu and kv_memory is None:
        kv_memory = CPU_KV_BYTES
    try:
        return plan_memory(
            MemoryTarget(
                slots=None if slots == AUTO else slots,
                max_slots=min(rows, CPU_SLOTS) if on_cpu else rows,
                kv=kv_memory,
                min_kv=per_token * _longest(sizes, arguments) // (devices * stages),
                kv_share=vllm.kv_share,
            ),
            weights=sizes.weights(itemsize, quantised_bits(config, arguments.get("quantization")))
            // (devices * stages),
            slot=sizes.per_rank(devices, divided=divided) // stages * int(arguments["max_lora_rank"]) * itemsize,
            runtime=RUNTIME,
            device=device if on_cpu or kv_memory is not None else int(device * arguments["gpu_memory_utilization"]),
        )
    except NoRoom as error:
        raise NoRoom(
            f"the base model and its adapters do not fit on {'this host' if on_cpu else 'a GPU'}: {error}; state less "
            f"of max_loras ({slots}), max_lora_rank ({arguments['max_lora_rank']}), max_model_len or kv_memory, or "
            "use a quantised base model, tensor_parallel_size or a larger device"
        ) from None


def _longest(sizes: BaseSizes, arguments: Mapping[str, Any]) -> int:
    """Returns the tokens of the longest sequence that vLLM must have room for."""
    stated = arguments.get("max_model_len")
    if stated is None:
        return sizes.context
    if isinstance(stated, int) and stated > 0:
        return min(stated, sizes.context)
    return min(MIN_KV_TOKENS, sizes.context)
