"""Capacity of a node, logged at its start: tokens per second, and room for adapters and running requests."""

from __future__ import annotations

import time
from statistics import median

import msgspec

from adapters.base_model import PROJECTIONS, BaseModel
from cluster.messages import GenerateRequest, Sampling
from node_agent.adapter_memory.pool import Pool
from node_agent.engine.loop import Engine
from node_agent.engine.reserves import Callers
from node_agent.ipc import Finished, Generated

RANKS = (8, 16, 32, 64, 128)
CALLERS = (1, 8)
CONTEXT = 64
"""Number of context tokens of each caller for which the performance model's tokens per second are computed."""
SECONDS = 0.3
"""Seconds for which dummy requests decode, for each of the numbers in CALLERS; at least one step is measured."""
STEPS = 24
SLOW_STEP_S = 0.1
"""Duration of a step, in seconds, above which more callers are not measured, since this would delay the start."""


class Capacity(msgspec.Struct, frozen=True):
    """Capacity of a node."""

    kv_tokens: int
    """Maximum number of prompt and output tokens of all running requests together."""
    device_adapters: dict[str, int]
    """Number of adapters that fit on the device at once, by rank. They adapt all seven projections of each layer."""
    host_adapters: dict[str, int]
    tokens_per_second: dict[str, float] = {}
    """Tokens per second of all callers together without adapters, by number of callers; empty if unknown."""
    device: str = ""
    dtype: str = ""


def capacity_of(engine: Engine, base: BaseModel) -> Capacity:
    """Returns the capacity of an engine's node. May decode dummy requests."""
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
    """Returns the number of adapters of one rank, on all projections of all layers, that fit in an empty pool."""
    return pool.pages.count // pool.uniform_layout(base, rank, range(len(PROJECTIONS))).pages


def tokens_per_second(engine: Engine) -> dict[str, float]:
    """Returns the total tokens per second without adapters, by number of callers. Omits numbers of callers that do not
    fit on the node or can't be measured."""
    callers = [rows for rows in CALLERS if rows <= min(engine.limits.max_rows, engine.blocks.free)]
    if engine.drift is not None:
        model = engine.drift.measured.decode
        return {str(rows): rows / model.seconds(rows, rows * CONTEXT, 0) for rows in callers}
    rates: dict[str, float] = {}
    for rows in callers:
        seconds = _step_seconds(engine, rows)
        if seconds is None:
            break
        rates[str(rows)] = rows / seconds
        if seconds > SLOW_STEP_S:
            break
    return rates


def _step_seconds(engine: Engine, rows: int) -> float | None:
    """Returns the median seconds of decode steps of `rows` dummy requests. Returns None if they ended before a step was
    timed."""
    names = [f"speed-{row}" for row in range(rows)]
    for name in names:
        engine.submit(GenerateRequest(name, "", "", [1], STEPS, Sampling(temperature=0), timeout=30.0, ignore_eos=True))
    took: list[float] = []
    started = set[str]()
    end = float("inf")
    while engine.busy and (not took or time.monotonic() < end):
        begin, all_started = time.monotonic(), len(started) == rows
        engine.step()
        events = engine.take_events()
        if any(isinstance(event, Finished) for event in events):
            break
        if all_started:
            took.append(time.monotonic() - begin)
        else:
            started.update(event.id for event in events if isinstance(event, Generated))
            end = time.monotonic() + SECONDS
    for name in names:
        engine.cancel(name)
    engine.take_events()
    engine.scheduler.callers = Callers()  # reserve nothing for the dummies' tenant
    return median(took) if took else None
