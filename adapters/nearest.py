"""The name that a mistyped one may have meant."""

from __future__ import annotations

import difflib
import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import takewhile

CLOSE = 0.7
"""difflib's ratio from which a name counts as meant: one letter wrong in four at most, two in ten."""
MAX_CHARACTERS = 80
"""Characters of the typed name that are compared; the rest is ignored."""
WINDOW = 48
"""Names that are compared on each side of the typed one's place in the order."""
COMPARED = 8
"""Candidates that difflib compares: it takes a tenth of a millisecond for two long names."""


def nearest(typed: str, names: Iterable[str], count: int = 1) -> list[str]:
    """Returns up to `count` of the known names that are close to the typed one, the closest first. Case does not
    count."""
    folded = {name.lower(): name for name in names if name != typed}
    return [folded[name] for name in difflib.get_close_matches(typed[:MAX_CHARACTERS].lower(), folded, count, CLOSE)]


def did_you_mean(typed: str, names: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name, which asks whether another was meant; "" where no known name
    is close."""
    close = nearest(typed, names)
    return f"; did you mean {close[0]!r}?" if close else ""


class NameIndex:
    """Many names, of which only those that share a beginning or an end with the typed one are compared.

    A single mistake leaves the parts before and after it in place, so the meant name mostly stands near the typed one
    in the order of the names, or in that of the names read backwards. Among thousands that differ in one place only it
    may be missed.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = sorted(names)
        self._reversed = sorted(name[::-1] for name in names)

    def __len__(self) -> int:
        return len(self._names)

    def nearest(self, typed: str, count: int = 1) -> list[str]:
        """Does what the function `nearest` does with these names, at a cost that hardly rises with their number."""
        folded = typed[:MAX_CHARACTERS].lower()
        backwards = _around(self._reversed, folded[::-1])
        candidates = {*_around(self._names, folded), *(name[::-1] for name in backwards)} - {typed}
        return nearest(typed, heapq.nlargest(COMPARED, candidates, key=lambda name: _shared_ends(folded, name)), count)


def _shared_ends(first: str, second: str) -> int:
    """Returns how many characters two names share at their beginning and at their end, less the difference in
    length."""
    return _common(first, second) + _common(reversed(first), reversed(second)) - abs(len(first) - len(second))


def _common(first: Iterable[str], second: Iterable[str]) -> int:
    """Returns in how many characters both begin alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _around(ordered: Sequence[str], typed: str) -> Sequence[str]:
    place = bisect_left(ordered, typed)
    return ordered[max(0, place - WINDOW) : place + WINDOW]
