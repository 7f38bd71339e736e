"""Cost of structured output: tokens/s of eight rows, two of them with a grammar, over eight rows without.

    python -m benchmarks.structured.cost --json benchmarks/results/structured_cost.json

One engine in this process, all rows decoding. Each round runs both kinds of batches, in alternated order, and no round
begins after SECONDS, so that the whole takes less than 150 s. The grammar lets a row write for as long as the
others (a JSON list of words without an end), so that all batches have the same shape. `mask_us` are the times to make
one mask, and `compile_ms` those to compile the drawn schemas of tests/support/drawn_schemas.py and a large one, each
for the first time.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.coldstart.paired import paired_ratio
from benchmarks.common.report import SMOLLM2, ContentionProbe, arguments, publish, report
from cluster.messages import Grammar, Sampling
from node_agent.cores import usable_cores
from node_agent.engine.grammars import Grammars
from tests.support.drawn_schemas import draw_schema
from tests.support.local_engine import LocalEngine

ROWS, CONSTRAINED = 8, 2
PROMPT = list(range(100, 132))
ENDLESS = Grammar(
    "json", json.dumps({"type": "array", "minItems": 10_000, "items": {"type": "string", "maxLength": 12}})
)
SCHEMAS = 20
MASKS = 5_000
SECONDS = 80.0
MIN_ROUNDS = 5


def tokens_per_second(engine: LocalEngine, constrained: int, tokens: int, seed: int) -> float:
    """Runs a batch and returns its tokens/s, from the first step in which all rows decode."""
    for row in range(ROWS):
        grammar = ENDLESS if row < constrained else None
        sampling = Sampling(temperature=0.8, seed=seed + row, grammar=grammar)
        engine.submit([*PROMPT, 200 + row, seed % 1000], tokens, sampling=sampling, ignore_eos=True)
    started = list(engine.outcomes.values())[-ROWS:]
    engine.run(lambda: all(outcome.tokens for outcome in started))
    begin, done = time.perf_counter(), sum(len(outcome.tokens) for outcome in started)
    engine.run()
    return (ROWS * tokens - done) / (time.perf_counter() - begin)


def compile_times(model: Path, engine: LocalEngine, seed: int) -> tuple[list[float], list[float]]:
    """Returns the milliseconds to compile each schema, and the microseconds to make each mask of a text of theirs."""
    rng = random.Random(seed)
    parts = {f"p{i}": draw_schema(rng) for i in range(40)}
    alone = {name: part for name, part in parts.items() if "$defs" not in part}  # their places are relative to the root
    large = {"type": "object", "properties": alone}
    grammars = Grammars(model / "tokenizer.json", engine.base.vocab_size, engine.engine.eos_ids, lambda: None)
    compiled, masks = list[float](), list[float]()
    for schema in [*(draw_schema(rng) for _ in range(SCHEMAS)), large]:
        begin = time.perf_counter()
        state = grammars.start(Grammar("json", json.dumps(schema)), [])
        while not state.ready:
            time.sleep(0.0001)
        compiled.append(1e3 * (time.perf_counter() - begin))
        while not state.ended and len(masks) < MASKS:
            begin = time.perf_counter()
            bits = state.mask()
            masks.append(1e6 * (time.perf_counter() - begin))
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            state.append_token(int(rng.choice(allowed)))
    grammars.close()
    return compiled, masks


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    settings: dict[str, Any] = {"rows": ROWS, "constrained": CONSTRAINED, "tokens": 32}
    rounds = options.rounds
    if options.quick:
        settings["tokens"], rounds = 8, 1
    torch.set_num_threads(usable_cores())
    probe, rows = ContentionProbe(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as registry:
        engine = LocalEngine(options.model, Path(registry), threads=usable_cores())
        tokens_per_second(engine, CONSTRAINED, 4, 0)
        begin = time.monotonic()
        for number in range(rounds):
            if number >= MIN_ROUNDS and time.monotonic() - begin > SECONDS:
                break
            for constrained in (0, CONSTRAINED) if number % 2 else (CONSTRAINED, 0):
                rate = tokens_per_second(engine, constrained, settings["tokens"], ROWS * (number + 1))
                rows.append({"round": number, "constrained": constrained, "tok_s": rate})
        compiled, masks = compile_times(options.model, engine, options.seed)
        engine.engine.close()
    settings["rounds"] = len(rows) // 2
    by_kind: dict[int, dict[Hashable, float]] = {0: {}, CONSTRAINED: {}}
    for row in rows:
        by_kind[row["constrained"]][row["round"]] = row["tok_s"]
    ratio = paired_ratio(by_kind[CONSTRAINED], by_kind[0], options.seed)
    assert ratio is not None
    figures = {"ratio": ratio.median, "ratio_lower": ratio.median_lower, "ratio_upper": ratio.median_upper}
    figures["ratio_worst"] = min(by_kind[CONSTRAINED][number] / rate for number, rate in by_kind[0].items())
    for name, values in (("compile_ms", compiled), ("mask_us", masks)):
        figures |= {f"{name}_{share}": float(np.percentile(values, share)) for share in (50, 99, 100)}
    publish(report("structured_cost", settings | probe.values(), options.seed, rows, figures), options.json)


if __name__ == "__main__":
    main()
