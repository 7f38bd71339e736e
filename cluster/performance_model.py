"""Performance model of a node: the time that its work takes. `garnish profile` fits it; scheduler and simulator use it.

decode(S)  = base + per_row max(0, |S| - flat_rows) + per_context (sum of contexts) + per_rank R(S)
prefill(Q) = base + per_token T + per_token2 (sum of squares) + per_token_rank (sum of tokens * rank)
load(n)    = latency + n / bandwidth, shared by the transfers in flight

All times are in seconds. R(S) depends on the LoRA kernel. For BGMV it is |S| times the largest rank of the batch
(Toppings, section 5). For MBGMV it is the sum of the ranks of the requests, or of the distinct adapters, whichever
predicts held-out steps better. A step of up to flat_rows rows takes no longer than a step of one row, because reading
the base's weights then takes longer than computing with them. Where a kernel pads every adapter to one rank, each
adapter counts as `padded_rank`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MODEL_VERSION = 1

RankTerm = Literal["max_rank", "request_ranks", "adapter_ranks"]
RANK_TERMS: tuple[RankTerm, ...] = ("max_rank", "request_ranks", "adapter_ranks")
_KERNEL_TERMS: dict[str, tuple[RankTerm, ...]] = {"bgmv": ("max_rank",), "mbgmv": ("request_ranks", "adapter_ranks")}


def rank_terms(kernel: str) -> tuple[RankTerm, ...]:
    """Returns the candidate rank terms of a kernel. BGMV pads all rows to the largest rank; MBGMV processes each row at
    its rank (Toppings, section 5). For other kernels all terms are candidates."""
    return _KERNEL_TERMS.get(kernel, RANK_TERMS)


def counted_rank(rank: int, padded_rank: int) -> int:
    """Returns the rank as which an adapter counts. `rank`: its own, 0 for the base model alone; `padded_rank`: that of
    the model."""
    return max(rank, padded_rank) if rank else 0


class ModelKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions of a measurement. A model with another key does not apply to this node."""

    hardware: str
    """Name of the device. For a CPU it includes the number of compute threads and how bf16 products are computed. It
    includes the runner unless that is transformers."""
    base: str
    """Fingerprint of the base model."""
    dtype: str
    kernel: str
    """LoRA kernel of decode rows: bgmv, mbgmv, cpu or vllm."""
    garnish: str
    """Version of Garnish that made the measurement."""


class DecodeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model of the time (seconds) of one decode step of a batch."""

    base: float
    per_row: float
    per_context: float
    """Seconds per token of context, summed over all rows."""
    per_rank: float
    rank_term: RankTerm
    flat_rows: int = 0
    """Number of rows up to which an additional row costs nothing."""
    padded_rank: int = 0
    """Rank to which the kernel pads every adapter; 0: adapters count as their own ranks."""

    def seconds(self, rows: float, contexts: float, ranks: float) -> float:
        """Returns the seconds of a decode step. `ranks` is R(S), which the caller computes by `rank_term` from
        counted ranks (`counted_rank`)."""
        row = self.per_row * max(0, rows - self.flat_rows)
        return self.base + row + self.per_context * contexts + self.per_rank * ranks

    def seconds_saved(self, rows: int, fewer_rows: int, fewer_contexts: int) -> float:
        """Returns the seconds by which a step of `rows` is shorter without `fewer_rows` of them and `fewer_contexts`
        context tokens. The cost of these rows' ranks is not counted."""
        costly = max(0, rows - self.flat_rows)
        return self.per_row * min(fewer_rows, costly) + self.per_context * fewer_contexts

    def next_row(self, rows: int) -> float:
        """Returns the seconds that one more row adds to a step of `rows`, without its context and rank."""
        return self.per_row * min(1, max(0, rows + 1 - self.flat_rows))


class PrefillModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model of the time (seconds) of one prefill pass over prompts or chunks of prompts."""

    base: float
    per_token: float
    per_token2: float
    per_token_rank: float
    padded_rank: int = 0
    """Same as `DecodeModel.padded_rank`, for prompts."""

    def seconds(self, tokens: float, squares: float, token_ranks: float) -> float:
        """Returns the seconds of a prefill pass. `squares` is the sum of tokens * tokens over the prompts;
        `token_ranks` is the sum of tokens * counted rank."""
        return self.base + self.per_token * tokens + self.per_token2 * squares + self.per_token_rank * token_ranks


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Model of the time (seconds) to move n bytes alone on a link: latency + n / bandwidth. `bandwidth` is in
    bytes/s."""

    latency: float
    bandwidth: float

    def seconds(self, bytes: float) -> float:
        """Returns the seconds to move this number of bytes."""
        return self.latency + bytes / self.bandwidth


class PerformanceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Performance model of a node: decode steps, prefill passes and loads of adapters."""

    key: ModelKey
    decode: DecodeModel
    prefill: PrefillModel
    to_device: Transfer
    """Transfer from host memory to the device."""
    from_store: Transfer
    """Transfer from the object store to host memory."""
    exposed_share: float = 1.0
    """Fraction of a load's time by which a cold request waits longer than a warm one's prefill takes."""
    version: int = MODEL_VERSION
