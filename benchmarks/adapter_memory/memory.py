"""Adapter memory under a real trace: pages against fixed slots, best-fit contiguous memory and unified rows.

Every call names an adapter. If it is not in memory, least recently used adapters that no running request holds are
evicted until it fits. All four allocators get the same calls, adapters, pool and eviction; no weights are moved.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from statistics import mean
from typing import Any

import numpy as np

from adapters.base_model import BaseModel, projection_widths
from benchmarks.adapter_memory.allocators import Allocator, BestFit, Pages, Shape, Slots, UnifiedRows
from benchmarks.common.report import arguments, publish, report
from benchmarks.common.trace import draw_calls, minute_counts

RANKS = (8, 16, 32, 64, 128)
ATTENTION, ALL = (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6)
CALLS = 100_000
RUNNING = 16
"""Requests that run at once; each ends when this many later ones have begun."""
TOP = 10
"""The busiest functions make nine tenths of the calls; rows without them show the rest."""


def llama(name: str, kv_heads: int, inner: int) -> BaseModel:
    config = {
        "hidden_size": 4096, "intermediate_size": inner, "num_attention_heads": 32, "num_key_value_heads": kv_heads
    }  # fmt: skip
    return BaseModel(name, "", "llama", 32, 4096, 32000, 4096, projection_widths(config))


BASES = {"llama-7b": llama("llama-7b", 32, 11008), "llama-8b": llama("llama-8b", 8, 14336)}
TARGETS = {"attention": (ATTENTION,), "mixed": (ATTENTION, ALL), "all": (ALL,)}


def makers(pool: int, base: BaseModel, targets: str) -> dict[str, Callable[[], Allocator]]:
    largest = Shape(base, max(RANKS), TARGETS[targets][-1])
    return {
        "pages": lambda: Pages(pool, base),
        "slots": lambda: Slots(pool, largest),
        "bestfit": lambda: BestFit(pool),
        "slora": lambda: UnifiedRows(pool, base),
    }


def replay(allocator: Allocator, pool: int, calls: list[int], shapes: list[Shape]) -> dict[str, float]:
    """Means over the calls after the first eviction, when demand has filled the pool."""
    resident: OrderedDict[int, None] = OrderedDict()
    running: deque[int] = deque()
    pins: Counter[int] = Counter()
    hits = evictions = refused = live = 0
    samples: list[tuple[float, float, int]] = []
    for name in calls:
        if len(running) == RUNNING:
            pins[running.popleft()] -= 1
        if name in resident:
            hits += 1
            resident.move_to_end(name)
        else:
            placed = allocator.place(name, shapes[name])
            while not placed:
                victim = next((candidate for candidate in resident if not pins[candidate]), None)
                if victim is None:
                    break
                del resident[victim]
                allocator.remove(victim)
                live -= shapes[victim].live
                evictions += 1
                placed = allocator.place(name, shapes[name])
            if not placed:
                refused += 1
                continue
            resident[name] = None
            live += shapes[name].live
        pins[name] += 1
        running.append(name)
        if evictions:
            lost = allocator.used - live + allocator.unusable()
            samples.append((live / pool, lost / pool, len(resident)))
    if not samples:
        raise ValueError("the adapters all fit the pool: there is no excess demand to measure")
    return {
        "utilisation": mean(sample[0] for sample in samples),
        "fragmentation": mean(sample[1] for sample in samples),
        "adapters_per_gib": mean(sample[2] for sample in samples) / (pool / (1 << 30)),
        "hit_rate": hits / len(calls),
        "evictions": evictions,
        "refused": refused,
    }


def run(seed: int, calls: int, cases: list[tuple[str, str, int, int]]) -> list[dict[str, Any]]:
    """A row per case (base, targets, pool in GiB, busiest functions left out) and allocator."""
    rows: list[dict[str, Any]] = []
    for base_name, targets, gib, without in cases:
        rng = np.random.default_rng(seed)
        base, pool = BASES[base_name], gib << 30
        counts = minute_counts(without)
        shapes = [
            Shape(base, int(rng.choice(RANKS)), TARGETS[targets][rng.integers(len(TARGETS[targets]))])
            for _ in range(len(counts))
        ]
        drawn = draw_calls(counts, calls, rng).tolist()
        demand = sum(shape.live for shape in shapes) / pool
        for name, make in makers(pool, base, targets).items():
            case = {
                "base": base_name, "targets": targets, "pool_gib": gib, "without_top": without, "demand": demand
            }  # fmt: skip
            rows.append({**case, "allocator": name, **replay(make(), pool, drawn, shapes)})
    return rows


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The first case's figures, and those of the same without the busiest functions as `rest_...`."""
    figures: dict[str, float] = {}
    first = rows[0]
    for row in rows:
        if any(row[key] != first[key] for key in ("base", "targets", "pool_gib")):
            continue
        rest = "rest_" if row["without_top"] else ""
        prefix = "" if row["allocator"] == "pages" else f"{row['allocator']}_"
        for key in ("utilisation", "fragmentation", "adapters_per_gib", "hit_rate"):
            figures[f"{rest}{prefix}{key}"] = row[key]
    return figures


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    cases = [("llama-7b", "mixed", 16, 0), ("llama-7b", "mixed", 16, TOP)]
    calls = 4_000 if options.quick else CALLS
    if not options.quick:
        cases += [("llama-7b", "mixed", gib, TOP) for gib in (8, 32)]
        cases += [("llama-7b", targets, 16, TOP) for targets in ("attention", "all")]
        cases.append(("llama-8b", "mixed", 16, TOP))
    rows = run(options.seed, calls, cases)
    settings = {"calls": calls, "ranks": list(RANKS), "running": RUNNING, "functions": len(minute_counts())}
    publish(report("memory", settings, options.seed, rows, figures_of(rows)), options.json)


if __name__ == "__main__":
    main()
