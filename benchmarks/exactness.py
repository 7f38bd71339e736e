"""Greedy tokens in fp32 against PEFT alone, over drawn adapters, batches, arrivals, chunk borders and cancellations.

Every answer of the engine is held against PEFT run alone with that adapter. Half of the prompts begin as an earlier one
of their batch, whose keys and values they may find (`cached_tokens`). A token may differ where PEFT's two best
logits lie closer than 1e-4 (a tie); after it the comparison goes on from PEFT's token. Adapter memory is far smaller
than the adapters together (both are in the settings), so that loads and evictions go on all the time. Each cold chunk's
plan is drawn (wait, pipeline, assist), and so are the order and the times in which its layers arrive; CPU workers are
killed and stopped at drawn moments (forced.py). Rows of adapters that are on their way join decode steps at drawn
times.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.exact import Case, Tally, check
from benchmarks.forced import ForcedStarts, force
from benchmarks.local_engine import LocalEngine, Outcome
from benchmarks.peft_reference import TIE, PeftReference, draw_adapter, make_adapter
from benchmarks.report import ROOT, arguments, publish, report
from benchmarks.worker_counters import counters_of
from node_agent.cores import spare_cores

CASES, QUICK_CASES = 2000, 16
ADAPTERS, QUICK_ADAPTERS = 24, 8
LARGE: tuple[dict[str, Any], ...] = (
    {"r": 512, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]},
    {"r": 128, "lora_alpha": 16, "target_modules": ["k_proj", "o_proj", "down_proj"]},
)
"""The others' ranks are drawn from 1 to 64."""
POOL = 3 << 20
"""Bytes: little more than the largest adapter takes, and far less than all, so that they are evicted all the time."""
FAULTS = 0.03
"""Chance that a cold chunk's beginning meets a worker that is killed or stopped."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run_batch(
    rng: random.Random,
    engine: LocalEngine,
    reference: PeftReference,
    kinds: list[Case],
    tally: Tally,
    seen: Counter[str],
) -> list[str]:
    """Up to 16 requests that arrive while others run; some are cancelled. Returns what is wrong; `seen` counts what
    happened to adapters that had to be loaded."""
    engine.engine.limits = replace(engine.engine.limits, chunk_tokens=rng.randint(1, 64))
    running: list[tuple[Case, str]] = []
    doomed: list[str] = []
    for _ in range(rng.randint(1, 16)):
        kind = rng.choice(kinds)
        prompt = [1, *(rng.randrange(3, engine.base.vocab_size) for _ in range(rng.randint(0, 120)))]
        if running and rng.random() < 0.5:
            earlier, _ = rng.choice(running)
            cut = rng.randint(1, len(earlier.prompt))
            kind, prompt = rng.choice([earlier, earlier, kind]), earlier.prompt[:cut] + prompt[cut:]
        case = Case(kind.directory, kind.adapter, prompt, rng.randint(1, 40))
        request = engine.submit(case.prompt, case.max_tokens, case.adapter)
        if rng.random() < 0.15:
            doomed.append(request)
        else:
            running.append((case, request))
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if doomed and rng.random() < 0.5:
            engine.engine.cancel(doomed.pop())
    engine.run()
    engine.assert_clean()
    problems: list[str] = []
    for _, request in running:
        seen["cached_tokens"] += engine.outcomes[request].cached_tokens
        finished = engine.outcomes[request].finished
        if finished is not None and finished.cold_start.plan != "none":
            seen.update(cold=1, replays=finished.cold_start.replays)
            seen.update(layers_cpu=finished.cold_start.layers_cpu, layers_device=finished.cold_start.layers_device)
    for case, request in running:
        outcome = engine.outcomes[request]
        found = check(engine, reference, case, outcome.tokens, tally)
        problems += [f"{problem}; {_circumstances(engine, case, outcome)}" for problem in found]
    engine.outcomes.clear()
    return problems


def _circumstances(engine: LocalEngine, case: Case, outcome: Outcome) -> str:
    """What it takes to judge a wrong answer that may not come again."""
    adapter = case.directory.name if case.directory is not None else "no adapter"
    workers = counters_of(engine.engine.assist.workers) if engine.engine.assist is not None else "none"
    return (
        f"{adapter}, prompt {case.prompt}, chunks of {engine.engine.limits.chunk_tokens}, answer {outcome.tokens}, "
        f"{outcome.finished and outcome.finished.cold_start}, CPU workers so far: {workers}"
    )


def study(options: Any, root: Path) -> dict[str, Any]:
    wanted, adapters = (QUICK_CASES, QUICK_ADAPTERS) if options.quick else (options.cases, ADAPTERS)
    rng = random.Random(options.seed)
    model = Path(options.model).absolute()
    engine = LocalEngine(
        model, root / "registry", dtype="float32", threads=1, block_tokens=4, max_rows=16, adapter_memory=POOL,
        kv_memory=64 << 20, cpu_workers=min(1, len(spare_cores(1))), prefix_cache="auto",
    )  # fmt: skip
    forced = force(engine.engine, random.Random(options.seed + 1), FAULTS)
    kinds = [Case(None, None, [], 0)]
    for i in range(adapters):
        config = LARGE[i] if i < len(LARGE) else draw_adapter(rng, engine.base.num_layers)
        path = make_adapter(model, root / f"drawn{i}", i, DTYPES[i % 3], **config)
        kinds.append(Case(path, engine.deploy(path), [], 0))
    sizes = sum(case.adapter.bytes for case in kinds if case.adapter)
    reference = PeftReference(model)
    tally, problems, seen = Tally(), [], Counter(cold=0, layers_cpu=0, layers_device=0, replays=0, cached_tokens=0)
    while tally.cases < wanted:
        problems += run_batch(rng, engine, reference, kinds, tally, seen)
    engine.close()
    settings = {
        "model": model.name, "adapters": adapters, "adapter_file_bytes": sizes, "adapter_memory": POOL,
        "faults": FAULTS, "tie": TIE, "quick": options.quick,
    }  # fmt: skip
    figures: dict[str, float] = {
        "cases": tally.cases,
        "tokens": tally.tokens,
        "mismatches": tally.mismatches,
        "ties": tally.ties,
    }
    figures |= dict(seen) | _forced(forced)
    return report("exactness", settings, options.seed, [{"problem": problem} for problem in problems], figures)


def _forced(forced: ForcedStarts) -> dict[str, int]:
    plans = {f"chunks_{name}": count for name, count in forced.plans.items()}
    return plans | {"rows_joined": forced.joined, "workers_killed": forced.kills, "workers_stopped": forced.stops}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default=str(ROOT / "models" / "stories260K"))
    parser.add_argument("--cases", type=int, default=CASES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        publish(study(options, Path(root)), options.json)


if __name__ == "__main__":
    main()
