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
from typing import Any, Literal

from adapters.functions import Defaults
from gateway.calls.marks import overlap

ToolParserName = Literal["hermes", "llama3_json"]
HERMES_OPENING, HERMES_CLOSING = "<tool_call>", "</tool_call>"
LLAMA_MARK = "<|python_tag|>"
"""Text that may precede calls, and that only chat templates of Llama's form have."""
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){0,400}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""Begin of a call whose name comes before its arguments."""
IN_STRING = re.compile(r'["\\\x00-\x1f]')
OUT_OF_STRING = re.compile(r'["{}\[\]]|[^\s"{}\[\]]+')


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
    return ToolForm(names, HERMES_OPENING, HERMES_CLOSING)


def llama3_json(names: frozenset[str]) -> ToolForm:
    """Returns the form of Llama 3.1, and of answers whose form is a grammar of calls."""
    return ToolForm(names, marks=(LLAMA_MARK,))


def tool_parser(defaults: Defaults, template: str) -> ToolParserName:
    """Returns the form of calls: that of `defaults.tool_parser`, or the one that the chat template shows. `template`:
    the base model's, which counts if the function has none."""
    shown = defaults.chat_template or template
    return defaults.tool_parser or ("llama3_json" if LLAMA_MARK in shown else "hermes")


class ToolParser:
    """Parser of one answer, fed as it is generated."""

    def __init__(self, form: ToolForm) -> None:
        self._form = form
        self._buffer = ""
        """text that is not sent yet"""
        self._call: _Call | None = None
        """call that has begun; None: outside of calls"""
        self._space = ""
        """whitespace before the call that has begun, which is left out if it proves to be one"""
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
        self._space = text[size:] if opening else ""
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
        body, closing, rest = self._parted(call.scan.feed(self._buffer) or call.sent, call.scan, last)
        yield from call.feed(body, self._form.names)
        if not (closing or last or (not self._form.closing and call.scan.end)):
            return
        if call.name:
            self.calls += 1
            if more := body[call.scan.end :].strip() if call.scan.end else "":
                yield Text(more)
        elif pieces := call.end(body, self._form.names):
            self.calls += 1
            yield from pieces
        else:
            self._is_text = True
            yield Text(self._space + self._form.opening + body + closing)
        self._buffer, self._call, self._space = rest, None, ""

    def _parted(self, start: int, scan: _ObjectScan, last: bool) -> tuple[str, str, str]:
        """Returns the call's text so far, its closing if it has come, and the text after it. A closing inside of the
        call's JSON object is part of it. `start`: place from which a closing is searched."""
        text, mark = self._buffer, self._form.closing
        if not mark:
            return (text[: scan.end], "", text[scan.end :]) if scan.end else (text, "", "")
        if not (scan.end or scan.broken or last):
            return text, "", ""
        body, closing, rest = text[start:].partition(mark)
        waiting = 0 if closing or last else overlap(body, mark)
        return text[:start] + body[: len(body) - waiting], closing, rest


class _Call:
    """Call that is being generated."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.name = ""
        """name, once it was sent"""
        self.scan = _ObjectScan()
        self._arguments = _ObjectScan()
        self._begin = self.sent = 0
        """place in the body where the arguments begin, and to which they were sent"""

    def feed(self, body: str, names: frozenset[str]) -> Iterator[Piece]:
        """Sends the parts of the body, from its begin to now, that are complete and were not sent."""
        if not self.name:
            head = HEAD.match(body)
            name = _loaded(head[1]) if head else None
            if head is None or name not in names:
                return
            self.name, self._begin, self.sent = name, head.end(), head.end()
            yield CallBegin(self._index, name)
        arguments = body[self._begin :]
        end = self._begin + (self._arguments.feed(arguments) or len(arguments))
        if end > self.sent:
            yield CallArguments(self._index, body[self.sent : end])
            self.sent = end

    def end(self, body: str, names: frozenset[str]) -> list[Piece]:
        """Returns the pieces of a call of another order or form, which was not sent so far; none if it is no call."""
        call = _loaded(body)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in names:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        plain = text.encode(errors="replace").decode()  # a lone surrogate is no text
        return [CallBegin(self._index, name), CallArguments(self._index, plain)]


class _ObjectScan:
    """Search for the end of a JSON object in text that grows. Each character is read once."""

    def __init__(self) -> None:
        self._place = self._depth = 0
        self._quoted = False
        self.end = 0
        """Length of the object with the whitespace before it; 0 while it is not complete."""
        self.broken = False
        """True if the text is no JSON object, as far as it was read."""

    def feed(self, text: str) -> int:
        """Returns `end`. `text`: from its begin to now."""
        while not (self.end or self.broken):
            mark = (IN_STRING if self._quoted else OUT_OF_STRING).search(text, self._place)
            if mark is None:
                self._place = max(self._place, len(text))
                break
            if mark[0] == "\\" and self._quoted:
                self._place = mark.end() + 1  # also if the escaped character is still to come
            else:
                self._place = mark.end()
                self._read(mark[0])
        return self.end

    def _read(self, mark: str) -> None:
        if mark == '"':
            self._quoted = not self._quoted
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.end = 0 if self._depth else self._place
        self.broken = self._depth < 0 or (not self._depth and not self.end) or mark < " "


def _loaded(text: str) -> Any:
    """Returns the value of JSON text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
