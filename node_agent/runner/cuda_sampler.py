"""Chooses the tokens of all rows together, on the device. The operations depend on shapes alone, not on values.

Each row is sampled as in `node_agent.runner.sampler`: rules change its scores, then temperature, top-k, top-p and min-p
apply, then the inverse transform of the row's uniform number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from node_agent.runner.cuda_blocks import OutFields, Spec, StepFields
from node_agent.runner.prompt_scores import ROWS_AT_ONCE
from node_agent.runner.sampler import GREEDY_BELOW
from node_agent.runner.score_rules import ScoreEdits, apply_edits
from node_agent.runner.token_masks import TokenMasks, apply_masks
from node_agent.types import ScoredToken

ROWS_DRAWN_AT_ONCE = 32
"""Number of rows for which tokens are drawn at once. A draw has four fp64 tensors, each of 33 MB for a vocabulary of
128,256."""


@dataclass(frozen=True)
class ScoreChanges:
    """Changes to the logits of a pass before sampling."""

    edits: ScoreEdits | None
    """edits by the rows' rules, with indices into the flattened logits"""
    masks: TokenMasks | None
    """tokens that the rows' grammars allow"""


def sample(
    logits: torch.Tensor, fields: StepFields, changes: ScoreChanges | None, out: OutFields, everything: bool
) -> None:
    """Chooses the next tokens by logits [Q, V], and writes them to `out`. `everything`: whether rows may sample and
    have log probabilities; if not, all are greedy."""
    rows = logits.shape[0]
    raw = logits.float()
    out.finite[:rows].copy_(raw.amax(dim=-1).isfinite())  # amax propagates NaN and +inf
    scores = raw
    if changes is not None:
        scores = raw.clone()
        if changes.edits is not None:
            apply_edits(scores.view(-1), changes.edits)
        if changes.masks is not None:
            apply_masks(scores, changes.masks, raw)
    tokens = scores.argmax(dim=-1)
    if everything:
        for begin in range(0, rows, ROWS_DRAWN_AT_ONCE):
            part = slice(begin, min(begin + ROWS_DRAWN_AT_ONCE, rows))
            drawn = _draw(scores[part], fields, part)
            tokens[part] = torch.where(fields.temperature[part] >= GREEDY_BELOW, drawn, tokens[part])
            _logprobs(raw[part], tokens[part], out, part)
    out.ids[:rows].copy_(tokens)


def _draw(scores: torch.Tensor, fields: StepFields, part: slice) -> torch.Tensor:
    """Returns drawn tokens i64[n] for the rows in `part`. They are drawn by inverse transform among those that pass
    top-k, top-p and min-p."""
    settings = (fields.temperature, fields.top_k, fields.top_p, fields.min_p, fields.uniform)
    temperature, top_k, top_p, min_p, uniform = (setting[part, None] for setting in settings)
    vocab = scores.shape[1]
    ranked, ids = (scores / temperature.clamp(min=GREEDY_BELOW)).sort(dim=-1, descending=True, stable=True)
    place = torch.arange(vocab, device=scores.device)
    ranked = ranked.masked_fill(place >= torch.where(top_k > 0, top_k, vocab), float("-inf"))
    probs = ranked.double().softmax(dim=-1)
    cumulative = probs.cumsum(dim=-1)
    keep = cumulative - probs < top_p  # the token that crosses top_p stays
    keep &= probs >= min_p * probs[:, :1]
    keep &= place < torch.where(top_k > 0, top_k, vocab)
    probs = probs * keep
    cumulative = probs.cumsum(dim=-1)
    at = torch.searchsorted(cumulative, cumulative[:, -1:] * uniform, right=True)
    last = (keep.sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # no token may pass if scores are not finite
    return ids.gather(1, torch.minimum(at, last))[:, 0]


def _logprobs(raw: torch.Tensor, tokens: torch.Tensor, out: OutFields, part: slice) -> None:
    values = raw.log_softmax(dim=-1)
    out.chosen[part].copy_(values.gather(1, tokens[:, None])[:, 0])
    best, ids = values.topk(out.top_ids.shape[1], dim=-1)
    out.top_ids[part].copy_(ids)
    out.top_values[part].copy_(best)


# --- score rules


def join_edits(edits: dict[int, ScoreEdits], vocab: int) -> dict[str, torch.Tensor]:
    """Joins the rows' logit edits into the fields of one ScoreEdits for the flattened logits. `edits`: edits by row."""
    places = {
        name: torch.cat([getattr(edit, name) + row * vocab for row, edit in edits.items()])
        for name in ("never", "biased", "penalised")
    }
    return places | {
        name: torch.cat([getattr(edit, name) for edit in edits.values()])
        for name in ("bias", "repetition", "frequency", "presence")
    }


# --- log probabilities of prompts

SCORE_COLUMNS = 2
"""Number of columns before the likeliest tokens in a packed row: the token's log probability and rank. After them come
k log probabilities and k ids."""


def score_spec(rows: int, top: int, vocab: int) -> Spec:
    """Returns the dtype and shape of packed scores of `rows` prompt tokens, with the `top` most likely tokens of
    each."""
    return {"packed": (torch.float32, (rows, SCORE_COLUMNS + 2 * min(top, vocab)))}


def pack_scores(head: Callable[[torch.Tensor], torch.Tensor], fields: StepFields, packed: torch.Tensor) -> None:
    """Computes packed scores, f32[S, SCORE_COLUMNS + 2k] on the device. Ranks and ids are stored as bits of i32.

    `head` returns the logits [n, V] of tokens i64[n].
    """
    k, as_ints = (packed.shape[1] - SCORE_COLUMNS) // 2, packed.view(torch.int32)
    for begin in range(0, packed.shape[0], ROWS_AT_ONCE):
        part = slice(begin, min(begin + ROWS_AT_ONCE, packed.shape[0]))
        values = head(fields.score_rows[part]).float().log_softmax(dim=-1)
        target_values = values.gather(1, fields.score_targets[part, None])
        packed[part, 0].copy_(target_values[:, 0])
        as_ints[part, 1].copy_((values >= target_values).sum(dim=-1))
        best, ids = values.topk(k, dim=-1)
        packed[part, SCORE_COLUMNS : SCORE_COLUMNS + k].copy_(best)
        as_ints[part, SCORE_COLUMNS + k :].copy_(ids)


def unpack_scores(packed: torch.Tensor, top: list[int]) -> list[ScoredToken]:
    """Returns the scores that are packed in host memory. `top`: number of most likely tokens to return, by row."""
    k, as_ints = (packed.shape[1] - SCORE_COLUMNS) // 2, packed.view(torch.int32)
    return [
        ScoredToken(row[0], ints[1], list(zip(ints[SCORE_COLUMNS + k :], row[SCORE_COLUMNS:], strict=False))[:count])
        for row, ints, count in zip(packed.tolist(), as_ints.tolist(), top, strict=True)
    ]
