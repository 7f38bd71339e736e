"""Chooses tokens from logits on the device. A token depends on its logits and (seed, choice, position) alone."""

from __future__ import annotations

import torch

from node_agent.device import record_event
from node_agent.runner.prompt_scores import Head, score_prompts
from node_agent.runner.token_masks import TokenMasks, apply_masks, join_masks
from node_agent.types import HostOutput, SamplingBatch, StepBatch, StepOutput

_MASK = (1 << 64) - 1

GREEDY_BELOW = 1e-5
"""Temperature below which decoding is greedy. Division by a smaller one could overflow."""

Logprobs = tuple[float, list[tuple[int, float]]]
"""Log probability of the chosen token, and (token id, log probability) of the k most likely ones."""


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns a number in [0, 1) that depends on the arguments alone (SplitMix64 finaliser of their mix)."""
    x = seed * 0x9E3779B97F4A7C15 + choice * 0xD1B54A32D192ED03 + position * 0x8CB92BA72F3D8DD7 + 0x632BE59BD9B4E019
    x &= _MASK
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = ((x ^ (x >> 30)) * multiplier) & _MASK
    x ^= x >> 31
    return (x >> 11) * 2.0**-53


def sample(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, list[Logprobs | None]]:
    """Returns sampled token ids i64[Q] on the device, and the requested log probabilities of each row. `logits` [Q, V]
    are the raw ones; log probabilities are of these."""
    raw = logits.float()
    changed = {row: _changed(raw[row : row + 1], batch, row) for row in {*batch.rules, *batch.masks}}
    tokens = raw.argmax(dim=-1)
    for row, scores in changed.items():
        tokens[row] = scores.argmax()
    drawn = [row for row, temperature in enumerate(batch.temperature) if temperature >= GREEDY_BELOW]
    for row in drawn:
        tokens[row] = _draw(
            changed.get(row, raw[row]) / batch.temperature[row],
            batch.top_k[row],
            batch.top_p[row],
            batch.min_p[row],
            batch.uniform[row],
        )
    return tokens, _logprobs(raw, tokens, batch)


@torch.inference_mode()
def step_output(head: Head, batch: StepBatch) -> StepOutput:
    """Returns the result of a pass: its tokens, log probabilities and prompt scores.

    `head` returns the logits [n, V] of tokens i64[n] of the pass; n may be 0.
    """
    scores = score_prompts(head, batch.scoring)
    logits = head(batch.logit_rows)
    if not logits.shape[0]:
        return HostOutput(torch.empty(0, dtype=torch.int64), [], frozenset(), record_event(logits.device), scores)
    tokens, logprobs = sample(logits, batch.sampling)
    # amax propagates NaN and +inf, and costs one read of the logits
    non_finite = frozenset((~logits.amax(dim=-1).isfinite()).nonzero().flatten().tolist())
    return HostOutput(tokens.cpu(), logprobs, non_finite, record_event(logits.device), scores)


def _changed(raw: torch.Tensor, batch: SamplingBatch, row: int) -> torch.Tensor:
    """Returns the row's logits f32[V] after its rules and its grammar. `raw`: f32[1, V]."""
    scores = raw.clone()
    if row in batch.rules:
        batch.rules[row].apply(scores[0])
    if row in batch.masks:
        joined = join_masks({0: batch.masks[row]})
        apply_masks(scores, TokenMasks(**{name: tensor.to(raw.device) for name, tensor in joined.items()}), raw)
    return scores[0]


def _draw(scores: torch.Tensor, top_k: int, top_p: float, min_p: float, u: float) -> torch.Tensor:
    """Returns a token drawn by inverse transform of `u` among those that pass top-k, then top-p, then min-p."""
    if top_k:
        scores, ids = scores.topk(min(top_k, scores.shape[0]))
    else:
        scores, ids = scores.sort(descending=True, stable=True)
    probs = scores.double().softmax(dim=-1)
    cumulative = probs.cumsum(dim=-1)
    keep = cumulative - probs < top_p  # the token that crosses top_p stays
    keep &= probs >= min_p * probs[0]
    probs = probs * keep
    cumulative = probs.cumsum(dim=-1)
    at = torch.searchsorted(cumulative, cumulative[-1] * u, right=True)
    return ids[at.clamp(max=int(keep.sum()) - 1)]


def _logprobs(raw: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> list[Logprobs | None]:
    out: list[Logprobs | None] = [None] * raw.shape[0]
    for row, k in enumerate(batch.logprobs):
        if k < 0:
            continue
        values = raw[row].log_softmax(dim=-1)
        chosen = float(values[tokens[row]])
        top: list[tuple[int, float]] = []
        if k:
            best, ids = values.topk(min(k, values.shape[0]))
            top = list(zip(ids.tolist(), best.tolist(), strict=True))
        out[row] = (chosen, top)
    return out
