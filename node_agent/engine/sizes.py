"""What a node takes at most, and how its memory is divided, where the service file leaves that to the device."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from adapters.base_model import BaseModel
from node_agent.config import EngineConfig, default_adapter_memory, pass_memory
from node_agent.device import free_memory, gpu_memory

MAX_CPU_KV = 1 << 30
"""Bytes."""
CPU_KV_PART = 4
"""Keys and values have one part in so many of a host's free memory: others use it, too."""


BY_DEVICE = {
    "cpu": {"max_rows": 32, "max_cold": 2, "chunk_tokens": 512},
    "cuda": {"max_rows": 256, "max_cold": 4, "chunk_tokens": 2048},
}
"""Bounds of passes, as EngineConfig has them. A GPU reads the base model's weights once for 256 rows as for one, and
2,048 tokens of prompts keep it busy; on a CPU a pass of that size would hold up everybody else's next token."""


def with_sizes(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Returns the settings with a number in the place of each 0 that stands for "by the device"."""
    adapter_memory = config.adapter_memory or default_adapter_memory(gpu_memory(device))
    bounds = {name: getattr(config, name) or size for name, size in BY_DEVICE[device.type].items()}
    return replace(config, adapter_memory=adapter_memory, **bounds)


def kv_blocks(config: EngineConfig, base: BaseModel, device: torch.device, dtype: torch.dtype) -> int:
    """Returns how many blocks of keys and values of this dtype the device has room for. To be asked once the base model
    is on it. Raises ValueError when it is fewer than two."""
    size, how = config.kv_memory, ""
    if size is None:
        size, how = _kv_room(config.adapter_memory, device)
    per_block = base.kv_elements * dtype.itemsize * config.block_tokens
    blocks = size // per_block
    if blocks < 2:
        raise ValueError(
            f"kv_memory: {size} bytes{how} hold {blocks} blocks of {per_block} bytes; at least 2 are needed"
        )
    return int(blocks)


def _kv_room(adapters: int, device: torch.device) -> tuple[int, str]:
    """Returns bytes, and in words how they were found. The adapters' memory is allocated later."""
    free, total = free_memory(device), gpu_memory(device)
    if total is None:
        return min(max(0, free - adapters) // CPU_KV_PART, MAX_CPU_KV), ""
    passes = pass_memory(total)
    room = max(0, free - adapters - passes)
    return room, f" (of {free} free on the GPU, less {adapters} of adapter_memory and {passes} for passes)"
