"""Log probabilities of prompt tokens, for requests that ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from node_agent.types import PromptScoring, ScoredToken

ROWS_AT_ONCE = 64
"""Number of rows whose logits are computed at once; they take 33 MB in fp32 for a vocabulary of 128,256."""

Head = Callable[[torch.Tensor], torch.Tensor]


@torch.inference_mode()
def score_prompts(head: Head, scoring: PromptScoring | None) -> list[ScoredToken]:
    """Returns the score of each prompt token in `scoring`; none without it. `head` returns the logits [n, V] of the
    tokens i64[n] of the pass."""
    if scoring is None:
        return []
    scored: list[ScoredToken] = []
    for begin in range(0, len(scoring.top), ROWS_AT_ONCE):
        part = slice(begin, begin + ROWS_AT_ONCE)
        scored += _score(head(scoring.rows[part]), scoring.targets[part], scoring.top[part])
    return scored


def _score(logits: torch.Tensor, targets: torch.Tensor, top: list[int]) -> list[ScoredToken]:
    values = logits.float().log_softmax(dim=-1)
    target_values = values.gather(1, targets[:, None])
    ranks = (values >= target_values).sum(dim=-1).tolist()
    best, ids = values.topk(min(max(top), values.shape[1]))
    return [
        ScoredToken(logprob, rank, list(zip(row_ids[:k], row_best[:k], strict=True)))
        for logprob, rank, row_ids, row_best, k in zip(
            target_values[:, 0].tolist(), ranks, ids.tolist(), best.tolist(), top, strict=True
        )
    ]


def all_finite(scored: list[ScoredToken]) -> bool:
    """Returns whether all scores are finite. Otherwise they must not be reported."""
    return all(math.isfinite(entry.logprob) for entry in scored)
