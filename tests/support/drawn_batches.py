"""Drawn batches of requests on an engine in this process, whose answers are held against PEFT alone."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from tests.support.exact import Case, Tally, check
from tests.support.local_engine import LocalEngine, Outcome
from tests.support.peft_reference import PeftReference
from tests.support.worker_counters import counters_of


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
