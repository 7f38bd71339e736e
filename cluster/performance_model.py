"""Time that a node's work takes: fitted by `garnish profile`, published in records, read by scheduler and simulator.

decode(S)  = base + per_row max(0, |S| - flat_rows) + per_context (sum of contexts) + per_rank R(S)
prefill(Q) = base + per_token T + per_token2 (sum of squares) + per_token_rank (sum of tokens * rank)
load(n)    = latency + n / bandwidth, shared by the transfers in flight

R(S) is |S| times the largest rank of the batch (BGMV, Toppings 5), or the sum of the ranks of its requests or of its
distinct adapters (MBGMV): of those of the node's kernel, whichever predicts held-out steps better. A few rows take no
longer than one, while reading the base's weights takes longer than computing with them. All times are in seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MODEL_VERSION = 1

RankTerm = Literal["max_rank", "request_ranks", "adapter_ranks"]
RANK_TERMS: tuple[RankTerm, ...] = ("max_rank", "request_ranks", "adapter_ranks")
_KERNEL_TERMS: dict[str, tuple[RankTerm, ...]] = {"bgmv": ("max_rank",), "mbgmv": ("request_ranks", "adapter_ranks")}


def rank_terms(kernel: str) -> tuple[RankTerm, ...]:
    """Returns what the ranks of a step may cost with a kernel: BGMV pads all rows to the largest, MBGMV walks each at
    its own (Toppings, section 5). Of other kernels nothing is known beforehand."""
    return _KERNEL_TERMS.get(kernel, RANK_TERMS)


class ModelKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions of a measurement; a model of another key says nothing of this node."""

    hardware: str
    """the device's name; of a CPU also how many threads compute, and how bf16 products are computed; the runner, where
    it is not transformers"""
    base: str
    """fingerprint"""
    dtype: str
    kernel: str
    """of decode rows: bgmv, mbgmv, or cpu"""
    garnish: str
    """version that measured it"""


class DecodeModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one decode step of a batch."""

    base: float
    per_row: float
    per_context: float
    """per token of context, over all rows"""
    per_rank: float
    rank_term: RankTerm
    flat_rows: int = 0
    """rows up to which more of them cost nothing"""

    def seconds(self, rows: float, contexts: float, ranks: float) -> float:
        """Returns the seconds of a decode step. `ranks` is R(S): the caller keeps it by `rank_term`."""
        row = self.per_row * max(0, rows - self.flat_rows)
        return self.base + row + self.per_context * contexts + self.per_rank * ranks

    def saved(self, rows: int, fewer_rows: int, fewer_contexts: int) -> float:
        """Returns the seconds that a step of `rows` takes less without some rows; what their ranks cost is not
        counted."""
        costly = max(0, rows - self.flat_rows)
        return self.per_row * min(fewer_rows, costly) + self.per_context * fewer_contexts

    def next_row(self, rows: int) -> float:
        """Returns the seconds that one more row adds to a step of `rows`, not counting its context and rank."""
        return self.per_row * min(1, max(0, rows + 1 - self.flat_rows))


class PrefillModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time of one pass over prompts (or chunks of them)."""

    base: float
    per_token: float
    per_token2: float
    per_token_rank: float

    def seconds(self, tokens: float, squares: float, token_ranks: float) -> float:
        """Returns the seconds of a prefill pass. `squares` is the sum of tokens * tokens of each prompt; `token_ranks`
        that of tokens * rank."""
        return self.base + self.per_token * tokens + self.per_token2 * squares + self.per_token_rank * token_ranks


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Time to move n bytes, alone on the link: latency + n / bandwidth (bytes/s)."""

    latency: float
    bandwidth: float

    def seconds(self, bytes: float) -> float:
        return self.latency + bytes / self.bandwidth


class PerformanceModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: ModelKey
    decode: DecodeModel
    prefill: PrefillModel
    to_device: Transfer
    """host memory to device"""
    from_store: Transfer
    """object store to host memory"""
    exposed_share: float = 1.0
    """Share of a load that a cold request waits beyond a warm one's prefill, as cold starts are planned here."""
    version: int = MODEL_VERSION
