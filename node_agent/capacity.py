"""What a node has room for, told at its start: adapters by rank on both tiers, and tokens in the KV cache."""

from __future__ import annotations

import msgspec

from adapters.artifact import FORMAT_VERSION, ArtifactHeader, LayerBlock, Pair
from adapters.base_model import PROJECTIONS, BaseModel
from node_agent.adapter_memory.layout import lay_out
from node_agent.adapter_memory.pool import Pool
from node_agent.engine.loop import Engine

RANKS = (8, 16, 32, 64, 128)


class Capacity(msgspec.Struct, frozen=True):
    kv_tokens: int
    """Prompt and output tokens of all running requests together."""
    device_adapters: dict[str, int]
    """By rank: how many adapters of all seven projections fit at once, if no others are there."""
    host_adapters: dict[str, int]


def capacity_of(engine: Engine, base: BaseModel) -> Capacity:
    store, itemsize = engine.store, engine.runner.dtype.itemsize
    slots = store.table.shape.slots
    return Capacity(
        kv_tokens=engine.blocks.total * engine.runner.block_tokens,
        device_adapters={str(rank): min(slots, fitting(store.pool, base, itemsize, rank)) for rank in RANKS},
        host_adapters={str(rank): fitting(store.host_memory.pool, base, itemsize, rank) for rank in RANKS},
    )


def fitting(pool: Pool, base: BaseModel, itemsize: int, rank: int) -> int:
    """How many adapters of one rank, on all projections of all layers, an empty pool takes."""
    pairs = tuple(Pair(projection, rank, 1.0, 0, 0) for projection in range(len(PROJECTIONS)))
    block = LayerBlock(0, 0, "", pairs)
    header = ArtifactHeader(FORMAT_VERSION, "", base.fingerprint, "float32", (block,) * base.num_layers)
    return pool.pages.count // lay_out(header, base, itemsize, pool.page_units).pages
