"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopMatcher:
    """Looks for the first stop string to be completed, wherever the pieces are cut.

    Text that may be the beginning of a stop string is held back until that is decided. When several stop strings are
    completed by the same character, the longest counts: the output never ends in half of one.
    Each stop string has its own Knuth-Morris-Pratt automaton, so a character costs O(len(stops)) amortised, whatever
    the strings are.
    """

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        if "" in stops:
            raise ValueError("an empty stop string would end every text")
        self._stops = list(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._withheld = ""
        self._include = include

    def feed(self, piece: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Returns the text that is safe to emit, and the stop string that is complete, or None.

        The stop string is part of the text only if `include` was set. With `counts` False one that `piece` completes
        is passed over. After a complete stop string the matcher must not be fed again.
        """
        if not self._stops:
            return piece, None
        text = self._withheld + piece
        for position, character in enumerate(piece, start=len(self._withheld) + 1):
            longest = self._advance(character)
            if longest and counts:
                self._withheld = ""
                stop = text[position - longest : position]
                return text[: position if self._include else position - longest], stop
        withheld = max(self._states)
        self._withheld = text[len(text) - withheld :]
        return text[: len(text) - withheld], None

    def flush(self) -> str:
        """Returns the text that was held back, once no more will come, and resets the matcher."""
        withheld, self._withheld = self._withheld, ""
        self._states = [0] * len(self._stops)
        return withheld

    def _advance(self, character: str) -> int:
        """Moves every automaton by one character; returns the length of the longest stop string that it completes."""
        longest = 0
        for index, stop in enumerate(self._stops):
            state, borders = self._states[index], self._borders[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            state += stop[state] == character
            if state == len(stop):
                longest = max(longest, state)
                state = borders[state - 1]
            self._states[index] = state
        return longest


def _borders(stop: str) -> list[int]:
    """Returns, per prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        length += stop[length] == stop[index]
        borders[index] = length
    return borders
