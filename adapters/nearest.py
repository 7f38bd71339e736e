"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import takewhile

CLOSE = 0.7
"""Minimum difflib ratio of a suggestion: at most one wrong letter in four, or two in ten."""
MAX_CHARACTERS = 80
"""Maximum number of characters of the typed name that are compared; the rest is ignored."""
WINDOW = 48
"""Number of names considered on each side of the typed name's position in sorted order."""
COMPARED = 8
"""Number of candidates that difflib compares, at a tenth of a millisecond for two long names."""


def nearest(typed: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Returns up to `count` of `names` that are similar to the typed one, most similar first. Case is ignored."""
    folded = {name.lower(): name for name in names if name != typed}
    return [folded[name] for name in difflib.get_close_matches(typed[:MAX_CHARACTERS].lower(), folded, count, CLOSE)]


def did_you_mean(typed: str, names: Iterable[str]) -> str:
    """Returns a suffix for a message about an unknown name, which suggests a similar name; "" if none is similar."""
    close = nearest(typed, names)
    return f"; did you mean {close[0]!r}?" if close else ""


class NameIndex:
    """Index of many names, which compares only those that share a beginning or an end with the typed one.

    A single mistake leaves the parts before and after it unchanged. The intended name is thus mostly close to the typed
    one in the sorted names, or in the sorted reversed names. Among thousands of names that differ in one place only, it
    may be missed.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted(names)
        self._reversed = sorted(name[::-1] for name in names)

    def __len__(self) -> int:
        return len(self._names)

    def nearest(self, typed: str, count: int = 1) -> list[str]:
        """Returns up to `count` of the index's names that are similar to the typed one, most similar first. The time
        hardly grows with the number of names."""
        folded = typed[:MAX_CHARACTERS].lower()
        backwards = _around(self._reversed, folded[::-1])
        candidates = {*_around(self._names, folded), *(name[::-1] for name in backwards)} - {typed}
        return nearest(typed, heapq.nlargest(COMPARED, candidates, key=lambda name: _shared_ends(folded, name)), count)


def _shared_ends(first: str, second: str) -> int:
    """Returns the number of characters that two names share at both ends, less the difference in length."""
    return _common(first, second) + _common(reversed(first), reversed(second)) - abs(len(first) - len(second))


def _common(first: Iterable[str], second: Iterable[str]) -> int:
    """Returns the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _around(ordered: Sequence[str], typed: str) -> Sequence[str]:
    place = bisect_left(ordered, typed)
    return ordered[max(0, place - WINDOW) : place + WINDOW]
