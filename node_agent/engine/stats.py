"""Snapshot of the engine for the API process and the node's record."""

from __future__ import annotations

import math

from msgspec.structs import replace

from cluster.news import StrictRoom
from cluster.node_load import tightest_tpot
from node_agent.engine.base import EngineBase
from node_agent.engine.preemption import strict_room
from node_agent.engine.promises import paused_on_average, tightest_promise
from node_agent.engine.reserves import Room
from node_agent.ipc import Stats


def stats_of(engine: EngineBase) -> Stats:
    """Returns a snapshot of the engine between two iterations."""
    running, queue, store, drift = list(engine.running.values()), engine.queue, engine.store, engine.drift
    tightest = tightest_tpot(
        (r.tpot for r in [*queue, *running] if r.tpot is not None), drift.published if drift else None
    )
    return Stats(
        running=len(running),
        queued=len(queue),
        kv_blocks_free=engine.blocks.free,
        adapter_bytes_free=store.free_bytes,
        batch_ranks=[max(r.lease.ranks, default=0) if r.lease else 0 for r in running],
        batch_contexts=[r.computed for r in running],
        batch_slots=[r.lease.slot if r.lease else -1 for r in running],
        residents=store.residents(),
        prompt_tokens_left=sum(max(0, r.prompt_len - r.computed) for r in running),
        loading_bytes=store.loading_bytes,
        performance=drift.published if drift else None,
        forecast_ratio=drift.forecast_ratio if drift else None,
        measuring=engine.measuring,
        tightest_tpot=tightest if tightest < math.inf else None,
        strict=_strict_room(engine),
        prefetches=engine.prefetcher.underway,
        prefetch_useful_bytes=engine.prefetcher.record.useful_bytes,
        prefetch_late_bytes=engine.prefetcher.record.late_bytes,
        prefetch_wasted_bytes=engine.prefetcher.record.wasted_bytes,
        vllm=engine.vllm_load,
    )


def _strict_room(engine: EngineBase) -> StrictRoom:
    running, rows = list(engine.running.values()), engine.limits.max_rows
    reserved = engine.scheduler.reserves(rows).for_strict()
    free = Room(rows - len(running), engine.blocks.free)
    room = strict_room(running, engine.queue, reserved, free, engine.blocks.shared, engine.scheduler.short)
    if engine.drift is None:  # without a model no promise is computed, so nobody pauses
        return room
    paused_rows, paused_contexts = paused_on_average(running)
    tightest = tightest_promise(running, engine.drift.published)
    return replace(room, paused_rows=paused_rows, paused_contexts=paused_contexts, tightest_tpot=tightest)
