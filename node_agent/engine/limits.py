"""Limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits on passes, requests and caches of an engine."""

    max_context: int
    vocab_size: int
    max_rows: int
    max_cold: int
    chunk_tokens: int
    queue_limit: int
    prefix_cache: bool = True
    """whether keys and values of finished requests stay cached for requests with the same prefix"""
    prefetch_waste: float | None = 0.25
    """Maximum wasted share of the bytes of predicted prefetches, 0 to 1, before they slow down; None: no predicted
    prefetches."""
