"""What a node is good for, logged at its start: tokens a second, and room for adapters and for running requests."""

from __future__ import annotations

import msgspec

from adapters.base_model import PROJECTIONS, BaseModel
from node_agent.adapter_memory.pool import Pool
from node_agent.engine.loop import Engine
from node_agent.performance.speed import tokens_per_second

RANKS = (8, 16, 32, 64, 128)


class Capacity(msgspec.Struct, frozen=True):
    kv_tokens: int
    """Prompt and output tokens of all running requests together."""
    device_adapters: dict[str, int]
    """By rank: how many adapters of all seven projections fit at once, if no others are there."""
    host_adapters: dict[str, int]
    tokens_per_second: dict[str, float] = {}
    """By number of callers: what all of them get together, without adapters. Empty: not known."""
    device: str = ""
    dtype: str = ""


def capacity_of(engine: Engine, base: BaseModel) -> Capacity:
    store, slots = engine.store, engine.store.table.shape.slots
    return Capacity(
        kv_tokens=engine.blocks.total * engine.runner.block_tokens,
        device_adapters={str(rank): min(slots, fitting(store.pool, base, rank)) for rank in RANKS},
        host_adapters={str(rank): fitting(store.host_memory.pool, base, rank) for rank in RANKS},
        tokens_per_second={callers: round(rate, 2) for callers, rate in tokens_per_second(engine).items()},
        device=str(engine.runner.device),
        dtype=str(engine.runner.dtype).removeprefix("torch."),
    )


def fitting(pool: Pool, base: BaseModel, rank: int) -> int:
    """Returns how many adapters of one rank, on all projections of all layers, an empty pool takes."""
    return pool.pages.count // pool.uniform_layout(base, rank, range(len(PROJECTIONS))).pages
