"""Search for stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopMatcher:
    """Finds the first stop string to be completed, however the text is split into pieces.

    Text that may be the beginning of a stop string is held back until that is decided. If one character completes
    several stop strings, the longest counts, so that the output never ends within one. Each stop string has its own
    Knuth-Morris-Pratt automaton, so a character costs O(len(stops)) amortised.
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
        """Returns the text that is safe to emit, and the completed stop string or None.

        The text includes the stop string only if `include` was set. With `counts` False, a stop string completed by
        `piece` is ignored. After a completed stop string, `feed` must not be called again.
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
        """Returns the text that was held back, at the end of the input, and resets the matcher."""
        withheld, self._withheld = self._withheld, ""
        self._states = [0] * len(self._stops)
        return withheld

    def _advance(self, character: str) -> int:
        """Advances all automata by one character. Returns the length of the longest stop string completed, or 0."""
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
    """Returns, for each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = borders[length - 1]
        length += stop[length] == stop[index]
        borders[index] = length
    return borders
