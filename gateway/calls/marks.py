"""Search for marks in text that comes in parts."""

from __future__ import annotations


def overlap(text: str, mark: str) -> int:
    """Returns the length of the longest end of the text that is a begin of the mark, shorter than the mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)
