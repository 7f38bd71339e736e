"""Greedy tokens against PEFT alone, over drawn adapters, batches, arrivals, chunk borders and cancellations.

Every answer of the engine is held against PEFT run alone with that adapter, in the engine's dtype. Half of the prompts
begin as an earlier one of their batch, whose keys and values they may find (`cached_tokens`). A token may differ where
PEFT's two best logits lie closer than the part's `tie`; after it the comparison continues from PEFT's token. Adapter
memory is far smaller than the adapters together (both are in the rows), so that adapters are loaded and evicted all the
time. Each cold chunk's plan is drawn (wait, pipeline, assist), and so are the order and the times in which its layers
arrive; CPU workers are killed and stopped at drawn moments (forced.py). Rows of adapters that are on their way join
decode steps at drawn times. The engine computes with two threads, and with fewer while it waits for CPU workers.

Parts:

- `one worker`: stories260K in fp32; half of the cases.
- `split weights`: the same with three CPU workers on the host's cores, which split the weights of every handoff that
  has too few tokens for all; a quarter.
- `fp16`: a drawn Llama of two layers in fp16, one CPU worker; a quarter.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.common.report import STORIES, arguments, report, run_study
from node_agent.coldstart import slices, worker_start
from node_agent.cores import spare_cores
from tests.support.crowded import make_crowded_pool
from tests.support.drawn_batches import run_batch
from tests.support.exact import Case, Tally
from tests.support.forced import ForcedStarts, force
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import TIE, PeftReference, draw_adapter, make_adapter
from tests.support.random_model import HALF_TOLERANCE, write_half_llama

CASES, QUICK_CASES = 2000, 24
ADAPTERS, QUICK_ADAPTERS = 24, 8
LARGE: tuple[dict[str, Any], ...] = (
    {"r": 512, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]},
    {"r": 128, "lora_alpha": 16, "target_modules": ["k_proj", "o_proj", "down_proj"]},
)
"""The others' ranks are drawn from 1 to 64."""
FAULTS = 0.03
"""Chance that a cold chunk's beginning meets a worker that is killed or stopped."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_VOCABULARY = 97
COUNTED = ("cold", "layers_cpu", "layers_device", "replays", "cached_tokens")


@dataclass(frozen=True)
class Part:
    dtype: str
    share: float
    tie: float
    adapter_memory: int
    """Bytes: little more than the largest adapter takes, and far less than all, so that they are evicted all the
    time."""
    large: tuple[dict[str, Any], ...]
    crowded: bool = False
    """Three CPU workers on this host's cores, in the place of one."""


PARTS = {
    "one worker": Part("float32", 0.5, TIE, 3 << 20, LARGE),
    "split weights": Part("float32", 0.25, TIE, 3 << 20, LARGE, crowded=True),
    "fp16": Part("float16", 0.25, 2 * HALF_TOLERANCE, 256 << 10, ()),
}


def study(options: Any, root: Path) -> dict[str, Any]:
    cases, adapters = (QUICK_CASES, QUICK_ADAPTERS) if options.quick else (options.cases, ADAPTERS)
    rows, half = [], write_half_llama(root / "half", HALF_VOCABULARY)
    for number, (name, part) in enumerate(PARTS.items()):
        model = half if part.dtype == "float16" else options.model
        folder = root / f"part{number}"
        rows.append({"part": name} | run_part(part, model, folder, round(cases * part.share), adapters, options.seed))
    settings = {"model": options.model.name, "adapters": adapters, "faults": FAULTS, "quick": options.quick}
    summed = [name for name, value in rows[0].items() if isinstance(value, int) and name != "adapter_memory"]
    figures: dict[str, float] = {name: sum(row[name] for row in rows) for name in summed}
    return report("exactness", settings, options.seed, rows, figures)


def run_part(part: Part, model: Path, folder: Path, cases: int, adapters: int, seed: int) -> dict[str, Any]:
    """Runs at least `cases` cases. Returns the part's row without its name."""
    rng = random.Random(seed)
    with _splitting() if part.crowded else nullcontext():
        engine = LocalEngine(
            model, folder / "registry", dtype=part.dtype, threads=2, block_tokens=4, max_rows=16, prefix_cache="auto",
            adapter_memory=part.adapter_memory, kv_memory=64 << 20, cpu_workers=min(1, len(spare_cores(1))),
        )  # fmt: skip
        with closing(engine):
            forced = force(engine.engine, random.Random(seed + 1), FAULTS)
            kinds = [Case(None, None, [], 0), *_deployed(engine, part, folder, adapters, rng)]
            reference = PeftReference(model, getattr(torch, part.dtype))
            tally, problems, counts = Tally(tie=part.tie), list[str](), Counter(dict.fromkeys(COUNTED, 0))
            while tally.cases < cases:
                problems += run_batch(rng, engine, reference, kinds, tally, counts)
    outcome = {name: getattr(tally, name) for name in ("cases", "tokens", "mismatches", "ties")}
    sizes = sum(case.adapter.bytes for case in kinds if case.adapter)
    memory = {"adapter_file_bytes": sizes, "adapter_memory": part.adapter_memory}
    return (
        {"dtype": part.dtype, "tie": part.tie}
        | outcome
        | dict(counts)
        | _forced(forced)
        | memory
        | {"problems": problems}
    )


@contextmanager
def _splitting() -> Iterator[None]:
    """Engines that are made meanwhile have three CPU workers, and give each a share of any weights, however few."""
    with (
        patch.object(worker_start, "make_pool", make_crowded_pool),
        patch.object(slices, "MIN_SHARE", 1),
    ):
        yield


def _deployed(engine: LocalEngine, part: Part, folder: Path, count: int, rng: random.Random) -> Iterator[Case]:
    for i in range(count):
        config = part.large[i] if i < len(part.large) else draw_adapter(rng, engine.base.num_layers)
        path = make_adapter(engine.model_dir, folder / f"drawn{i}", i, DTYPES[i % 3], **config)
        yield Case(path, engine.deploy(path), [], 0)


def _forced(forced: ForcedStarts) -> dict[str, int]:
    plans = {f"chunks_{name}": count for name, count in forced.plans.items()}
    return plans | {"rows_joined": forced.joined, "workers_killed": forced.kills, "workers_stopped": forced.stops}


def main() -> None:
    parser = arguments(__doc__ or "", STORIES)
    parser.add_argument("--cases", type=int, default=CASES)
    options = parser.parse_args()
    run_study(study, options)


if __name__ == "__main__":
    main()
