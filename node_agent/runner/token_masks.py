"""Masks of tokens that a grammar or `allowed_token_ids` allows, applied to the logits before sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

NEVER = float("-inf")


@dataclass(frozen=True)
class TokenMasks:
    """Masks of some rows of a batch."""

    rows: torch.Tensor
    """i64[g]: rows with a mask"""
    bits: torch.Tensor
    """i32[g, ceil(V / 32)]: tokens that each row allows, the lowest bit first"""


def mask_of(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Returns the tokens as bits: i32[ceil(V / 32)], the lowest bit first."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").view("<i4")


def join_masks(masks: Mapping[int, Callable[[], np.ndarray]]) -> dict[str, torch.Tensor]:
    """Returns the fields of TokenMasks in host memory. `masks` returns i32[ceil(V / 32)], by row; at least one."""
    bits = np.stack([mask() for mask in masks.values()])
    return {"rows": torch.tensor(list(masks)), "bits": torch.from_numpy(bits)}


def apply_masks(scores: torch.Tensor, masks: TokenMasks, raw: torch.Tensor) -> None:
    """Masks, in place, the tokens of scores f32[Q, V] that the rows' masks forbid.

    If a row's own rules forbid all tokens that its mask allows, the mask alone counts: the row takes its logits
    from `raw` f32[Q, V], which has no rules applied.
    """
    allowed = _unpacked(masks.bits, scores.shape[1])
    masked = scores[masks.rows].masked_fill(~allowed, NEVER)
    blocked = masked.amax(dim=-1, keepdim=True) == NEVER
    scores[masks.rows] = torch.where(blocked, raw[masks.rows].masked_fill(~allowed, NEVER), masked)


def _unpacked(bits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns the bits as bool[g, V]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :vocab_size]
