"""What an engine takes at most."""

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
