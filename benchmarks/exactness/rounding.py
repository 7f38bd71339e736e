"""Errors of log probabilities in bf16: the engine's and PEFT's own, both against PEFT in fp32.

Adapters of ranks 8 to 128 on q, k, v, each with its own weights, answer four prompts greedily; first all
one by one, then all at once, of which the engine has 16 at a time. PEFT, in fp32 and in bf16, then reads each answer.
At each of its tokens the two that the engine finds likeliest are looked at: how far their distance (of log
probabilities) is from the distance in fp32. `median`, `p99` and `most` are of that error. `flips`: tokens at which the
likeliest is not fp32's; `flip_gap`: the widest distance in fp32 between the two at such a token.

`texts_apart`: answers that the engine gave otherwise in company than alone; `apart_gap`: the widest distance, as the
engine had it alone, at their first token that differs. `same_texts`: pairs of adapters that answered a prompt equally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.common.adapters import make_adapters
from benchmarks.common.invoke import make_prompt, prompt_lengths
from benchmarks.common.report import SMOLLM2, arguments, report, run_study
from cluster.messages import Adapter, Sampling
from tests.support.local_engine import LocalEngine, Outcome
from tests.support.peft_reference import PeftReference

RANKS = (8, 16, 32, 64, 128)
ADAPTERS, QUICK_ADAPTERS = 40, 2
TOKENS = 16
MAX_WORDS, QUICK_WORDS = 1024, 16
MAX_ROWS = 16
POOL = 1 << 30
TWO_BEST = Sampling(temperature=0.0, logprobs=2)


@dataclass
class Errors:
    """Errors of the distance between two log probabilities."""

    distances: list[float] = field(default_factory=list)
    flips: list[float] = field(default_factory=list)
    """fp32's distance between its likeliest token and the one that was taken for it"""

    def add(self, exact: torch.Tensor, got: torch.Tensor, picked: torch.Tensor, pairs: torch.Tensor) -> None:
        """`exact`: f32[T, V], log probabilities in fp32; `got`: f32[T], distances between `pairs` (i64[T, 2]);
        `picked`: i64[T], the likeliest tokens."""
        want = exact.gather(1, pairs)
        self.distances += (got - (want[:, 0] - want[:, 1])).abs().tolist()
        below = exact.max(dim=1).values - exact.gather(1, picked[:, None])[:, 0]
        self.flips += below[below > 0].tolist()

    def row(self, name: str) -> dict[str, Any]:
        median, p99, largest = np.percentile(self.distances, (50, 99, 100)).tolist()
        flips = {"flips": len(self.flips), "flip_gap": max(self.flips, default=0.0)}
        return {"of": name, "tokens": len(self.distances), "median": median, "p99": p99, "most": largest, **flips}


def answers(engine: LocalEngine, calls: Sequence[tuple[Adapter, list[int]]], together: bool) -> list[Outcome]:
    requests = []
    for adapter, prompt in calls:
        requests.append(engine.submit(prompt, TOKENS, adapter, TWO_BEST, ignore_eos=True))
        if not together:
            engine.run()
    engine.run()
    outcomes = [engine.outcomes[request] for request in requests]
    if any(len(outcome.tokens) != TOKENS for outcome in outcomes):
        raise RuntimeError(f"an answer has not its {TOKENS} tokens")
    return outcomes


def hold(
    errors: dict[str, Errors], references: tuple[PeftReference, PeftReference], path: Path, prompt: list[int],
    answered: Sequence[tuple[str, Outcome]],
) -> None:  # fmt: skip
    """Books the errors of answers to one prompt by one adapter: the engine's, and PEFT's in bf16 at the same tokens."""
    exact_reference, coarse_reference = references
    for name, outcome in answered:
        ids = prompt + outcome.tokens[:-1]
        exact = exact_reference.logits(path, ids, last=TOKENS).log_softmax(1)
        coarse = coarse_reference.logits(path, ids, last=TOKENS).log_softmax(1)
        best = [each.top[:2] for each in outcome.logprobs]
        pairs = torch.tensor([[token for token, _ in two] for two in best])
        ours = torch.tensor([first - second for (_, first), (_, second) in best])
        theirs = coarse.gather(1, pairs)
        errors[name].add(exact, ours, pairs[:, 0], pairs)
        errors["PEFT"].add(exact, theirs[:, 0] - theirs[:, 1], coarse.argmax(1), pairs)


def apart(alone: Outcome, company: Outcome) -> float | None:
    """The distance of the two best at the first token that differs; None where none does."""
    for ours, theirs, each in zip(company.tokens, alone.tokens, alone.logprobs, strict=True):
        if ours != theirs:
            return float(each.top[0][1] - each.top[1][1])
    return None


def same_texts(outcomes: Iterable[Outcome], prompts: int) -> int:
    """`outcomes`: by adapter, then by prompt."""
    texts = Counter((i % prompts, tuple(outcome.tokens)) for i, outcome in enumerate(outcomes))
    return sum(count * (count - 1) // 2 for count in texts.values())


def study(options: Any, root: Path) -> dict[str, Any]:
    model = options.model
    count, words = (QUICK_ADAPTERS, QUICK_WORDS) if options.quick else (options.adapters, MAX_WORDS)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [make_prompt(n, options.seed + i) for i, n in enumerate(prompt_lengths(words))]
    prompts: list[list[int]] = [tokenizer.encode(text).ids for text in texts]
    ranks = [RANKS[i % len(RANKS)] for i in range(count)]
    paths = make_adapters(model, root / "adapters", ranks, options.seed, dtype=torch.bfloat16)
    engine = LocalEngine(model, root / "registry", dtype=options.dtype, max_rows=MAX_ROWS, adapter_memory=POOL)
    adapters = [engine.deploy(path) for path in paths]
    calls = [(adapter, prompt) for adapter in adapters for prompt in prompts]
    alone, company = answers(engine, calls, together=False), answers(engine, calls, together=True)
    engine.close()
    dtype: torch.dtype = getattr(torch, options.dtype)
    references = PeftReference(model), PeftReference(model, dtype)
    errors = {name: Errors() for name in ("PEFT", "alone", "company")}
    for i, (adapter_path, prompt) in enumerate((path, prompt) for path in paths for prompt in prompts):
        hold(errors, references, adapter_path, prompt, [("alone", alone[i]), ("company", company[i])])
    gaps = [gap for gap in map(apart, alone, company) if gap is not None]
    settings = {
        "model": model.name, "dtype": options.dtype, "adapters": count, "ranks": list(RANKS), "answers": len(calls),
        "tokens": TOKENS, "prompt_tokens": [len(prompt) for prompt in prompts], "max_rows": MAX_ROWS,
        "quick": options.quick,
    }  # fmt: skip
    rows = [each.row(name) for name, each in errors.items()]
    figures = {"texts_apart": len(gaps), "apart_gap": max(gaps, default=0.0)}
    figures |= {f"{figure}_{row['of']}": row[figure] for row in rows for figure in ("median", "p99", "most", "flips")}
    return report("rounding", settings, options.seed, rows, figures | {"same_texts": same_texts(alone, len(prompts))})


def main() -> None:
    parser = arguments(__doc__ or "", SMOLLM2)
    parser.add_argument("--adapters", type=int, default=ADAPTERS)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    run_study(study, options)


if __name__ == "__main__":
    main()
