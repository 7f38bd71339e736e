"""The thorough measurement of a node with vLLM, for `garnish profile`."""

from __future__ import annotations

import time

from msgspec.structs import replace

from adapters.blobs import blob_key
from adapters.open_store import open_store
from cluster.performance_file import PerformanceProfile
from cluster.performance_fit import MAX_ERROR
from node_agent.config import EngineConfig
from node_agent.performance.cases import LONG, Effort
from node_agent.performance.reads import LOOKED_AT, measure_reads
from node_agent.performance.repeats import Progress, passes
from node_agent.vllm.engine import VllmEngine
from node_agent.vllm.measuring.bench import bench, room_of
from node_agent.vllm.measuring.cases import GrowingBatch, PromptPass, growing_batches, prompt_passes
from node_agent.vllm.measuring.idle import planned
from node_agent.vllm.measuring.samples import Runs, fit_runs
from node_agent.vllm.measuring.setup import Conditions, dummy_folders, profile_of

LONG_BUDGET = 900.0
"""Maximum seconds that cases are run; beyond it, fewer repeats are made."""


def measure_performance(
    engine: VllmEngine, config: EngineConfig, conditions: Conditions, progress: Progress = lambda *_: None
) -> PerformanceProfile:
    """Measures the node, which takes minutes. Raises BadFit, BadSample, SweepTooSlow, MeasurementFailed, VllmDied or
    StoreUnavailable."""
    runs, cases = run_cases(engine, conditions, LONG, LONG_BUDGET, progress)
    fits = fit_runs(runs, cases, engine.store.limits.max_rank, MAX_ERROR, 1.0)
    progress("measuring reads from the store", 0.0)
    objects = open_store(config.registry)
    from_store = measure_reads(objects, objects.list(blob_key(""), limit=LOOKED_AT))
    return replace(profile_of(conditions, *fits, runs.loads), from_store=from_store, thorough=True)


def run_cases(
    engine: VllmEngine, conditions: Conditions, effort: Effort, budget: float, progress: Progress = lambda *_: None
) -> tuple[Runs, int]:
    """Returns the runs of all cases of the effort, and the number of configurations that were planned. Stops after
    `budget` seconds."""
    room, runs, folders = room_of(engine), Runs(), dummy_folders(engine, conditions)
    cases: list[GrowingBatch | PromptPass] = [*growing_batches(effort, room), *prompt_passes(effort, room)]
    order, deadline = passes(cases, effort.rounds), time.monotonic() + budget
    try:
        with bench(engine, folders, runs) as timed:
            for at, case in enumerate(order):
                if time.monotonic() > deadline:
                    break
                progress("measuring vLLM's steps", at / len(order))
                timed.measure(case)
    finally:
        folders.remove()
    return runs, planned(cases)
