"""Token equality with PEFT under the tie rule, shared by the tests and exactness.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.messages import Adapter
from tests.support.local_engine import LocalEngine
from tests.support.peft_reference import TIE, PeftReference


@dataclass
class Tally:
    """`ties`: tokens that differ where PEFT's two best logits lie closer than `tie`; `mismatches`: all others."""

    cases: int = 0
    tokens: int = 0
    mismatches: int = 0
    ties: int = 0
    tie: float = TIE


@dataclass(frozen=True)
class Case:
    directory: Path | None
    adapter: Adapter | None
    prompt: list[int]
    max_tokens: int


def check(engine: LocalEngine, reference: PeftReference, case: Case, got: list[int], tally: Tally) -> list[str]:
    """Hold one answer against PEFT; returns what is wrong with it.

    One teacher-forced run of PEFT over prompt and answer gives its greedy choice at every position: while all earlier
    tokens are equal, that is what it would have written. After a tie it goes on from PEFT's token.
    """
    eos = engine.engine.eos_ids
    tally.cases += 1
    prompt, left = case.prompt, case.max_tokens
    while True:
        if not 0 < len(got) <= left or (len(got) < left and got[-1] not in eos) or eos.intersection(got[:-1]):
            tally.mismatches += 1
            return [f"{len(got)} of {left} tokens: {got}"]
        logits = reference.logits(case.directory, prompt + got[:-1], last=len(got))
        best = logits.topk(2)
        want = best.indices[:, 0].tolist()
        same = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)
        if same is None:
            tally.tokens += len(got)
            return []
        tally.tokens += same + 1
        gap = float(best.values[same, 0] - best.values[same, 1])
        if gap >= tally.tie:
            tally.mismatches += 1
            return [_wrong_token(logits[same], same, got[same], want[same], gap)]
        tally.ties += 1
        prompt, left = prompt + got[:same] + want[same : same + 1], left - same - 1
        if not left or want[same] in eos:
            return []
        request = engine.submit(prompt, left, case.adapter)
        engine.run()
        got = engine.outcomes[request].tokens


def _wrong_token(logits: torch.Tensor, at: int, got: int, want: int, gap: float) -> str:
    """Rounding exchanges neighbours: a token that stands far below PEFT's tells of wrong numbers, whatever the gap."""
    place = int((logits > logits[got]).sum()) + 1
    below = float(logits[want] - logits[got])
    return f"token {at} is {got}, PEFT has {want} (gap {gap:.2e}; {got} is PEFT's number {place}, {below:.2e} below)"
