"""Time to the first token over torch's own fp32 products of the same shapes, which a prompt takes at least.

`prefill_512` is a prompt of 512 tokens for the base, in process. `first_token_37` is a short chat with an adapter that
is resident, in process and over HTTP. Products: of the decoder layers, q, k and v fused, gate and up fused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear

from adapters.base_model import BaseModel
from benchmarks.common.http_service import HttpService
from benchmarks.common.rule import ratio_figures
from benchmarks.engine.in_process import Workload, run_engine
from cluster.messages import Adapter
from node_agent.types import GROUPS
from tests.support.local_engine import LocalEngine

LONG, SHORT = 512, 37
ADAPTER = 3
"""number of the adapter of rank 64"""


class Fp32Products:
    """The products of one pass over all decoder layers, by torch in fp32."""

    def __init__(self, base: BaseModel) -> None:
        shapes = [
            (sum(base.widths[member][1] for member in members), base.widths[members[0]][0])
            for members in GROUPS.values()
        ]
        self.weights = [torch.randn(*shape) for _ in range(base.num_layers) for shape in shapes]

    @torch.inference_mode()
    def seconds(self, rows: int) -> float:
        xs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in self.weights}
        begin = time.perf_counter()
        for weight in self.weights:
            linear(xs[weight.shape[1]], weight)
        return time.perf_counter() - begin


def measure_prompts(
    engine: LocalEngine, adapters: list[Adapter], service: HttpService, rounds: int
) -> list[dict[str, Any]]:
    """Returns a row per round, every variant once in each."""
    products = Fp32Products(engine.base)
    long = min(LONG, engine.base.max_context - 1)  # of a small base less, which only quick runs take
    prompts = {length: [[5 + i % 64 for i in range(length)]] for length in (long, SHORT)}
    base, adapted = Workload("base", (None,)), Workload("adapted", (ADAPTER,))
    variants: dict[str, Callable[[], float]] = {
        f"products_{LONG}": lambda: products.seconds(long),
        f"engine_{LONG}": lambda: run_engine(engine, adapters, base, prompts[long], 1).ttft,
        f"products_{SHORT}": lambda: products.seconds(SHORT),
        f"engine_{SHORT}": lambda: run_engine(engine, adapters, adapted, prompts[SHORT], 1).ttft,
        f"http_{SHORT}": lambda: service.run(adapted.adapters, SHORT, 1)[0],
    }
    for run in variants.values():
        run()
    return [
        {"round": index, "workload": "prompts"} | {f"{name}_ms": run() * 1e3 for name, run in variants.items()}
        for index in range(rounds)
    ]


def prompt_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Medians of the rounds' own ratios over the products, each with its worst round; and the times' medians."""
    figures = {name: median(row[name] for row in rows) for name in rows[0] if name.endswith("_ms")}
    for name, of, length in (
        (f"prefill_{LONG}_over_products", "engine", LONG),
        (f"first_token_{SHORT}_over_products", "engine", SHORT),
        (f"http_first_token_{SHORT}_over_products", "http", SHORT),
    ):
        columns = ([row[f"{kind}_{length}_ms"] for row in rows] for kind in (of, "products"))
        figures |= ratio_figures(name, *columns, lower_is_better=True)
    return figures
