"""Times of a decode step by kind of operator, from torch's profiler over a few steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from torch.profiler import ProfilerActivity, profile

from cluster.messages import Adapter
from tests.support.local_engine import LocalEngine

KINDS = {
    "base products": ("mkldnn::_linear_pointwise", "aten::linear", "aten::matmul"),
    "adapter products": ("aten::mm", "aten::addmm_"),
    "attention": ("aten::_scaled_dot_product", "aten::scaled_dot_product"),
    "cache reads and writes": ("aten::index_select", "aten::index_copy_"),
}
"""Profile bf16: in fp32 the base's products are aten::mm or aten::addmm too, and count as adapter products."""

STEPS = 8


def breakdown(engine: LocalEngine, adapters: Sequence[Adapter | None], prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds per decode step of one batch: `step` on the wall, without the profiler, and the operators' own time.

    What they do not account for is Python, dispatch, and the compiled operators, which the profiler does not see.
    """
    requests = [
        engine.submit(prompt, 4 * STEPS, adapter, ignore_eos=True)
        for prompt, adapter in zip(prompts, adapters, strict=True)
    ]
    engine.run(until=lambda: all(len(engine.outcomes[r].tokens) >= 2 for r in requests))
    walls = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - begin)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(STEPS):
            engine.step()
    for request in requests:
        engine.engine.cancel(request)
    engine.run()
    step_ms = {"step": median(walls) * 1e3} | dict.fromkeys([*KINDS, "other operators"], 0.0)
    for entry in profiler.key_averages():
        kind = next((k for k, names in KINDS.items() if entry.key.startswith(names)), "other operators")
        step_ms[kind] += entry.self_cpu_time_total / 1e3 / STEPS
    return {name: round(value, 2) for name, value in step_ms.items()}
