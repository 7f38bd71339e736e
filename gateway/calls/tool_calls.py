"""Tool calls in the text of an answer, found while it is generated.

Models write a call as JSON with a name and arguments. The forms differ in what surrounds it. A call's name is sent as
soon as it is complete, and its arguments as they come. What is no call of a stated tool stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.calls.marks import overlap

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""Begin of a call whose name comes before its arguments."""


@dataclass(frozen=True)
class Text:
    """Part of the answer's text."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """Begin of a tool call."""

    index: int
    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(frozen=True)
class CallArguments:
    """Part of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Text | CallBegin | CallArguments


@dataclass(frozen=True)
class ToolForm:
    """Form of tool calls in answers. `opening`, `closing`: texts around a call. Both empty: the answer is a call or
    several, divided by `;`, or it is text."""

    names: frozenset[str]
    """names of the stated tools"""
    opening: str = ""
    closing: str = ""
    marks: tuple[str, ...] = ()
    """texts that may precede the first call, and are left out"""


def hermes(names: frozenset[str]) -> ToolForm:
    """Returns the form of Hermes, Qwen and SmolLM2."""
    return ToolForm(names, "<tool_call>", "</tool_call>")


def llama3_json(names: frozenset[str]) -> ToolForm:
    """Returns the form of Llama 3.1, and of answers whose form is a grammar of calls."""
    return ToolForm(names, marks=("<|python_tag|>",))


class ToolParser:
    """Parser of one answer, fed as it is generated."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._buffer = ""
        """text that is not sent yet"""
        self._call: _Call | None = None
        """call that has begun; None: outside of calls"""
        self._is_text = False
        """for forms without an opening: the answer is text"""
        self.calls = 0
        """Number of calls that were sent."""

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that the text completes."""
        self._buffer += text
        return list(self._pieces(last=False))

    def end(self) -> list[Piece]:
        """Returns the last pieces, at the end of the answer."""
        return list(self._pieces(last=True))

    def _pieces(self, last: bool) -> Iterator[Piece]:
        while True:
            before = (len(self._buffer), self._call)
            if self._call is not None:
                yield from self._inside(self._call, last)
            elif self._form.opening:
                yield from self._outside(last)
            else:
                yield from self._undivided(last)
            if (len(self._buffer), self._call) == before:
                return

    def _outside(self, last: bool) -> Iterator[Piece]:
        """Sends text up to the next opening. Whitespace waits for what follows, and is left out before and after
        calls."""
        text, opening, rest = self._buffer.partition(self._form.opening)
        size = len(text) if last or opening else len(text) - overlap(text, self._form.opening)
        if not (last and not opening and not self.calls):
            size = len(text[:size].rstrip())
        if size:
            yield Text(text[:size])
        self._buffer = rest if opening else "" if last else text[size:]
        if opening:
            self._call = _Call(self.calls)

    def _undivided(self, last: bool) -> Iterator[Piece]:
        """Sends text if the answer is no call."""
        stripped = self._buffer.lstrip(" \t\r\n;")
        for mark in self._form.marks:
            if not last and mark.startswith(stripped):
                return
            stripped = stripped.removeprefix(mark).lstrip()
        if not self._is_text and stripped.startswith("{"):
            self._buffer, self._call = stripped, _Call(self.calls)
        elif stripped or (last and not self.calls):
            self._is_text = True
            text, self._buffer = self._buffer, ""
            if text:
                yield Text(text)

    def _inside(self, call: _Call, last: bool) -> Iterator[Piece]:
        """Sends what the call has, and ends it at its closing."""
        body, closed, rest = self._buffer, last, ""
        if self._form.closing:
            body, closing, rest = self._buffer.partition(self._form.closing)
            closed = bool(closing) or last
            if not closed:
                body = body[: len(body) - overlap(body, self._form.closing)]
        else:
            length = _object_length(body)
            body, rest, closed = (body[:length], body[length:], True) if length else (body, "", last)
        yield from call.feed(body, self._form.names)
        if not closed:
            return
        if call.name:
            self.calls += 1
        elif pieces := call.end(body, self._form.names):
            self.calls += 1
            yield from pieces
        else:
            closing = self._form.closing if self._buffer.startswith(body + self._form.closing) else ""
            self._is_text = True
            yield Text(self._form.opening + body + closing)
        self._buffer, self._call = rest, None


class _Call:
    """Call that is being generated."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.name = ""
        """name, once it was sent"""
        self._begin = self._sent = 0
        """place in the body where the arguments begin, and to which they were sent"""

    def feed(self, body: str, names: frozenset[str]) -> Iterator[Piece]:
        """Sends the parts of the body, from its begin to now, that are complete and were not sent."""
        if not self.name:
            head = HEAD.match(body)
            name = json.loads(head[1]) if head else None
            if head is None or name not in names:
                return
            self.name, self._begin, self._sent = name, head.end(), head.end()
            yield CallBegin(self._index, name)
        arguments = body[self._begin :]
        end = self._begin + (_object_length(arguments) or len(arguments))
        if end > self._sent:
            yield CallArguments(self._index, body[self._sent : end])
            self._sent = end

    def end(self, body: str, names: frozenset[str]) -> list[Piece]:
        """Returns the pieces of a call of another order or form, which was not sent so far; none if it is no call."""
        try:
            call = json.loads(body)
        except ValueError:
            return []
        if not isinstance(call, dict) or call.get("name") not in names:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [CallBegin(self._index, call["name"]), CallArguments(self._index, text)]


def _object_length(text: str) -> int:
    """Returns the length of the JSON object at the begin of the text; 0 if it is not complete."""
    depth, quoted, escaped = 0, False, False
    for place, character in enumerate(text):
        if quoted:
            escaped, quoted = character == "\\" and not escaped, not (character == '"' and not escaped)
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if not depth:
                return place + 1
    return 0
