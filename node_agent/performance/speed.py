"""How many tokens a second a node computes: by its performance model, or else of a short run with dummy requests."""

from __future__ import annotations

import time
from statistics import median

from cluster.messages import GenerateRequest, Sampling
from node_agent.engine.loop import Engine
from node_agent.engine.reserves import Callers
from node_agent.ipc import Finished, Generated

CALLERS = (1, 8)
CONTEXT = 64
"""Tokens of each caller, for which the model is asked."""
SECONDS = 0.3
"""That a run of dummy requests decodes, for each of CALLERS; one step at least."""
STEPS = 24
SLOW_STEP_S = 0.1
"""Steps that take longer are not measured with more callers: the start would wait for it."""


def tokens_per_second(engine: Engine) -> dict[str, float]:
    """Returns by number of callers what all of them get together, without adapters. Leaves out what is more than the
    node takes at once, and what can't be measured."""
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
    """Returns the median time of decode steps of so many dummy requests; None if they ended before one was timed."""
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
    engine.scheduler.callers = Callers()  # no place is kept for the dummies' tenant
    return median(took) if took else None
