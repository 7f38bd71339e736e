"""Reasoning in the text of an answer (`<think>` forms), separated from the rest while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.text import BaseText
from gateway.calls.marks import overlap

OPENING, CLOSING = "<think>", "</think>"
PROMPT_END = 16
"""Number of the prompt's last tokens that are searched for the begin of reasoning."""


def opens_reasoning(text: BaseText, prompt: Sequence[int]) -> bool:
    """Returns whether the prompt ends with the begin of the reasoning."""
    return text.decode(prompt[-PROMPT_END:]).rstrip().endswith(OPENING)


@dataclass(frozen=True)
class Parts:
    """Parts of an answer that a piece of text adds."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Parser of one answer. The answer begins with reasoning if it begins with `<think>`, or if the prompt has opened
    it (`opened`). Whitespace around the two parts is left out."""

    def __init__(self, *, opened: bool) -> None:
        self._buffer = ""
        self._state = "reasoning" if opened else "begin"
        self._started = False
        """whether the present part has text"""

    @property
    def reasons(self) -> bool:
        """Returns whether the next token is part of the reasoning, as far as is known."""
        return self._state == "reasoning"

    def feed(self, text: str, *, last: bool = False) -> Parts:
        """Returns what the text adds. `last`: the answer has ended."""
        self._buffer += text
        reasoning = content = ""
        if self._state == "begin":
            start = self._buffer.lstrip()
            if start.startswith(OPENING):
                self._state, self._buffer = "reasoning", start.removeprefix(OPENING)
            elif not OPENING.startswith(start) or last:
                self._state, self._started = "content", True  # an answer without reasoning stays as it is
        if self._state == "reasoning":
            reasoning, closing, rest = self._buffer.partition(CLOSING)
            if closing:
                self._state, self._buffer = "content", rest
                reasoning = self._part(reasoning.rstrip())
                self._started = False
            else:
                size = (
                    len(reasoning) if last else len(reasoning[: len(reasoning) - overlap(reasoning, CLOSING)].rstrip())
                )
                reasoning, self._buffer = self._part(reasoning[:size]), reasoning[size:]
        if self._state == "content":
            content, self._buffer = self._part(self._buffer), ""
        return Parts(reasoning, content)

    def _part(self, text: str) -> str:
        """Returns the text of a part, without whitespace at the part's begin."""
        text = text if self._started else text.lstrip()
        self._started = self._started or bool(text)
        return text
