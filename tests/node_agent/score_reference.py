"""What a request's parameters make of its scores, by transformers' own logits processors."""

from __future__ import annotations

from collections.abc import Collection

import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
)

from cluster.messages import Sampling


def by_transformers(
    way: Sampling, scores: torch.Tensor, prompt: list[int], output: list[int], eos_ids: Collection[int]
) -> torch.Tensor:
    """Scores f32[V] before temperature, in vLLM's order: bad words, min_tokens, bias, penalties. Bad words are looked
    for in the output alone, as vLLM does."""
    row, ids = scores[None].clone(), torch.tensor([prompt + output], dtype=torch.int64)
    generated = torch.tensor([output], dtype=torch.int64)
    if way.bad_words:
        row = NoBadWordsLogitsProcessor([list(word) for word in way.bad_words])(generated, row)
    ends = sorted({*eos_ids, *way.stop_token_ids})
    if way.min_tokens and ends:
        row = MinNewTokensLengthLogitsProcessor(len(prompt), way.min_tokens, ends)(ids, row)
    if way.logit_bias:
        bias = {(token,): value for token, value in way.logit_bias.items()}
        row = SequenceBiasLogitsProcessor(bias)(ids, row)
    if way.repetition_penalty != 1.0:
        row = RepetitionPenaltyLogitsProcessor(way.repetition_penalty)(ids, row)
    counts = torch.bincount(generated[0], minlength=scores.shape[0]).float()
    changed: torch.Tensor = row[0] - way.frequency_penalty * counts - way.presence_penalty * (counts > 0)
    if way.allowed_token_ids:
        allowed = PrefixConstrainedLogitsProcessor(lambda *_: way.allowed_token_ids, 1)
        changed = allowed(ids, changed[None])[0]
    return changed


def interval(way: Sampling, scores: torch.Tensor, token: int) -> tuple[float, float]:
    """Where a uniform number must lie for `token` to be drawn from `scores`, which were changed as above."""
    row = scores[None] / way.temperature
    if way.top_k:
        row = TopKLogitsWarper(way.top_k)(torch.zeros(1, 1, dtype=torch.int64), row)
    ranked, ids = row[0].double().softmax(dim=-1).sort(descending=True, stable=True)
    place = ids.tolist().index(token)
    ends = ranked.cumsum(dim=-1)
    return float(ends[place] - ranked[place]), float(ends[place])
