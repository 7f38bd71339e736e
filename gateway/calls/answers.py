"""Parts of a chat's answer: reasoning, text and tool calls, found while it is generated."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.calls.reasoning import ReasoningParser
from gateway.calls.tool_calls import Piece, Text, ToolForm, ToolParser


@dataclass(frozen=True)
class Reasoning:
    """Part of the answer's reasoning."""

    text: str


AnswerPiece = Piece | Reasoning


@dataclass(frozen=True)
class AnswerForm:
    """Form of a chat's answers."""

    tools: ToolForm | None = None
    """form of tool calls; None: no tools are offered"""
    reasoning: bool = False
    """whether reasoning is separated from the text"""
    includes_reasoning: bool = True
    """whether the reply has the reasoning, if it is separated"""


class AnswerParser:
    """Parser of one answer. `opened`: the prompt has opened the reasoning."""

    def __init__(self, form: AnswerForm, *, opened: bool) -> None:
        self._form = form
        self._reasoning = ReasoningParser(opened=opened) if form.reasoning else None
        self._tools = ToolParser(form.tools) if form.tools is not None else None
        self.reasoning_tokens = 0
        """Number of tokens of the reasoning, with its marks."""

    @property
    def calls(self) -> int:
        """Returns the number of tool calls so far."""
        return self._tools.calls if self._tools is not None else 0

    def feed(self, text: str, tokens: int, *, last: bool = False) -> list[AnswerPiece]:
        """Returns the pieces that a part of the answer completes. `tokens`: its number of tokens."""
        pieces: list[AnswerPiece] = []
        if self._reasoning is not None:
            was_reasoning = self._reasoning.reasons
            parts = self._reasoning.feed(text, last=last)
            if was_reasoning or self._reasoning.reasons:
                self.reasoning_tokens += tokens
            if parts.reasoning and self._form.includes_reasoning:
                pieces.append(Reasoning(parts.reasoning))
            text = parts.content
        if self._tools is None:
            return [*pieces, Text(text)] if text else pieces
        pieces += self._tools.feed(text)
        return [*pieces, *self._tools.end()] if last else pieces
