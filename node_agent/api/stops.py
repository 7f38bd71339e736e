"""Search for stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Collection

SHOWN, HIDDEN = "s", "h"
"""Marks of characters: whether they are part of the output."""


class StopMatcher:
    """Finds the first stop string to be completed, however the text is split into pieces.

    Pieces may be hidden, such as the names of special tokens that the output leaves out. Stop strings that contain one
    of `hidden` are searched for in the text with hidden pieces, and all in the text without them. Text that may be the
    beginning of a stop string is held back until that is decided. If one character completes several stop strings, the
    one that begins first counts, so that the output never ends within one. Each stop string has its own
    Knuth-Morris-Pratt automaton, so a character costs O(len(stops)) amortised.
    """

    def __init__(self, stops: list[str], *, include: bool = False, hidden: Collection[str] = ()) -> None:
        """`hidden`: texts of hidden pieces."""
        if "" in stops:
            raise ValueError("an empty stop string would end every text")
        self._in_shown = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._in_all = [_Automaton(each.stop) for each in self._in_shown if any(name in each.stop for name in hidden)]
        self._withheld, self._marks = "", ""
        self._include = include

    @property
    def reads_hidden(self) -> bool:
        """Returns whether hidden pieces can complete a stop string."""
        return bool(self._in_all)

    def feed(self, piece: str, *, counts: bool = True, is_hidden: bool = False) -> tuple[str, str | None]:
        """Returns the text that is safe to emit, and the completed stop string or None.

        The text includes the stop string only if `include` was set. With `counts` False, a stop string completed by
        `piece` is ignored. After a completed stop string, `feed` must not be called again.
        """
        if not self._in_shown:
            return "" if is_hidden else piece, None
        text, marks = self._withheld + piece, self._marks + (HIDDEN if is_hidden else SHOWN) * len(piece)
        for end, character in enumerate(piece, start=len(self._withheld) + 1):
            match = self._advance(character, marks[:end], is_hidden)
            if match is not None and counts:
                begin, stop = match
                self._withheld = self._marks = ""
                before = _shown(text, marks, begin)
                return before + stop if self._include else before, stop
        first = self._first_withheld(marks)
        self._withheld, self._marks = text[first:], marks[first:]
        return _shown(text, marks, first), None

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the input, and resets the matcher."""
        text = _shown(self._withheld, self._marks, len(self._marks))
        self._withheld = self._marks = ""
        for each in (*self._in_shown, *self._in_all):
            each.state = 0
        return text

    def _advance(self, character: str, marks: str, is_hidden: bool) -> tuple[int, str] | None:
        """Advances the automata by one character, the last one of `marks`. Returns where the stop string that it
        completes begins, and that stop string; None if it completes none."""
        matches = [(len(marks) - len(each.stop), each.stop) for each in self._in_all if each.advance(character)]
        if not is_hidden:
            ended = [each.stop for each in self._in_shown if each.advance(character)]
            matches += [(_begin(marks, len(stop)), stop) for stop in ended]
        return min(matches, default=None)

    def _first_withheld(self, marks: str) -> int:
        shown = max(each.state for each in self._in_shown)
        return min(_begin(marks, shown), len(marks) - max((each.state for each in self._in_all), default=0))


class _Automaton:
    """Search for one stop string. `state`: number of its characters with which the text ends."""

    def __init__(self, stop: str) -> None:
        self.stop, self.state = stop, 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Advances by one character. Returns whether it completes the stop string."""
        state = self.state
        while state and self.stop[state] != character:
            state = self._borders[state - 1]
        state += self.stop[state] == character
        is_complete = state == len(self.stop)
        self.state = self._borders[state - 1] if is_complete else state
        return is_complete


def _begin(marks: str, count: int) -> int:
    """Returns the index of the `count`-th shown character from the end; the end itself for 0."""
    if HIDDEN not in marks:
        return len(marks) - count
    begin = len(marks)
    while count:
        begin -= 1
        count -= marks[begin] == SHOWN
    return begin


def _shown(text: str, marks: str, end: int) -> str:
    """Returns the shown characters of the text before `end`."""
    if HIDDEN not in marks:
        return text[:end]
    return "".join(character for character, mark in zip(text[:end], marks, strict=False) if mark == SHOWN)


def _borders(stop: str) -> list[int]:
    """Returns, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        length += stop[length] == stop[index]
        borders[index] = length
    return borders
