"""Limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_context: int
    vocab_size: int
    max_rows: int
    max_cold: int
    chunk_tokens: int
    queue_limit: int
    prefix_cache: bool = True
    """Keys and values are kept after their request's end, for others that begin as it did."""
    prefetch_waste: float | None = 0.25
    """Share of the bytes of predicted prefetches, 0 to 1, above which they back off; None: there are none."""
