"""Grammars of answers that may be text, and in which every tool call keeps its tool's schema (`strict`).

Text is free until a call begins, as gateway.calls.tool_calls recognizes it. From there the grammar allows calls of the
stated tools alone. A tokenizer may have a separate token for a mark, which llguidance knows by its id only. So the
grammars name such tokens besides the marks' texts, which a model may spell by other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from adapters.functions import Defaults
from cluster.grammars import OPTIONS
from cluster.messages import Grammar
from cluster.text import BaseText
from gateway.api.openai_schema import ChatRequest, ToolFunction, call_form
from gateway.api.schema import GenerationParams
from gateway.calls.grammars import StatedForm
from gateway.calls.reasoning import CLOSING as THOUGHT_END
from gateway.calls.reasoning import opens_reasoning
from gateway.calls.tool_calls import HERMES_CLOSING, HERMES_OPENING, LLAMA_MARK, ToolParserName, tool_parser

Reasoning = Literal["none", "possible", "opened"]
"""Possibility of reasoning that is separated from the answer's text; `opened`: the prompt has opened it."""

BLANK = r"\s\x1c-\x1f;"
"""Characters that parsers may leave out before a call."""
TERMINALS = rf"""
TEXT: /(?s:.+)/
SPACE: /[ \t\r\n]{{1,16}}/
BLANKS: /[{BLANK}]+/
"""
LLAMA_TERMINALS = rf"""
MARK: {json.dumps(LLAMA_MARK)}
FIRST: /[^{BLANK}{{](?s:.*)/ & ~/<\|python_tag\|>[{BLANK}]*(\{{(?s:.*))?/
"""
"""FIRST: text that the parser does not take for the begin of a call."""


@dataclass(frozen=True)
class AddedTokens:
    """Tokens of a tokenizer that llguidance does not take for text."""

    visible: dict[str, int]
    """ids of those that the answer's text has, by their texts"""
    special: dict[str, int]
    """ids of special tokens, which the answer's text leaves out"""
    ends: Collection[int]

    @classmethod
    def of(cls, text: BaseText) -> AddedTokens:
        added = text.tokenizer.get_added_tokens_decoder().items()
        special = {token.content: id for id, token in added if token.special}
        tags = {token.content: id for id, token in added if token.content[:1] == "<" and token.content[-1:] == ">"}
        visible = {tag: id for tag, id in tags.items() if tag not in special and id not in text.eos_ids}
        return cls(visible, special, text.eos_ids)

    def visible_except(self, mark: str) -> list[int]:
        """Returns the ids of visible tokens other than the mark."""
        return [id for content, id in self.visible.items() if content != mark]

    @property
    def hidden(self) -> list[int]:
        """Returns the ids of special tokens other than end tokens."""
        return [id for id in self.special.values() if id not in self.ends]


def free_form(call: GenerationParams, defaults: Defaults, text: BaseText, prompt: Sequence[int]) -> StatedForm | None:
    """Returns the form of an answer that may be text and calls; None if no tool is strict, or the answer may have no
    calls."""
    tools = call.offered_tools if isinstance(call, ChatRequest) and not call.forced_tools else []
    if not any(tool.strict for tool in tools):
        return None
    reasoning: Reasoning = "none"
    if defaults.reasoning_parser is not None:
        reasoning = "opened" if opens_reasoning(text, prompt) else "possible"
    grammar = strict_grammar(tools, tool_parser(defaults, text.template), text, reasoning)
    parts = {
        f"tools[{place}].function.parameters": Grammar("json", json.dumps(tool.parameters))
        for place, tool in enumerate(tools)
        if tool.strict and tool.parameters is not None
    }
    return StatedForm("tools", grammar, parts)


def strict_grammar(tools: list[ToolFunction], parser: ToolParserName, text: BaseText, reasoning: Reasoning) -> Grammar:
    """Returns the grammar of text and calls of tools. Tools that are not strict take any object."""
    tokens = AddedTokens.of(text)
    arguments = "arguments" if parser == "hermes" else "parameters"
    rules = _hermes(tokens) if parser == "hermes" else _llama3_json(tokens, reasoning)
    schema = json.dumps({"x-guidance": OPTIONS, **call_form(tools, arguments, strict_only=True)})
    return Grammar("lark", "\n".join(["%llguidance {}", *rules, f"form: %json {schema}", TERMINALS]))


def _hermes(tokens: AddedTokens) -> Iterator[str]:
    """Yields the rules of text with calls between marks."""
    free_tokens = tokens.visible_except(HERMES_OPENING)
    begin = _or_token("opening", "TEXT?", tokens.visible.get(HERMES_OPENING))
    end = _or_token("closing", "", tokens.visible.get(HERMES_CLOSING))
    yield "start: call* rest"
    yield f"call: {_gaps(free_tokens)} {begin} SPACE? form SPACE? {end}"
    yield f"rest: {_gaps(free_tokens)} TEXT? {_repeated(tokens.hidden)}"
    yield f"opening[lazy]: TEXT? {json.dumps(HERMES_OPENING)}"
    yield f"closing: {json.dumps(HERMES_CLOSING)}"


def _llama3_json(tokens: AddedTokens, reasoning: Reasoning) -> Iterator[str]:
    """Yields the rules of an answer that is calls, or text that does not begin like one. Where reasoning is separated,
    the text after each end of reasoning does not begin like one either."""
    free_tokens = tokens.visible_except(THOUGHT_END) if reasoning != "none" else list(tokens.visible.values())
    free_tokens = [id for id in free_tokens if id != tokens.visible.get(LLAMA_MARK)]
    mark = _or_token("MARK", "", tokens.visible.get(LLAMA_MARK, tokens.special.get(LLAMA_MARK)))
    gaps, token = _gaps(free_tokens), _token(free_tokens)
    answer = f"BLANKS? ({mark} BLANKS?)? (calls | free)? {_repeated(tokens.hidden)}"
    yield 'calls: form (SPACE? ";" SPACE? form)* SPACE?'
    yield f"free: FIRST{f' ({token} TEXT?)* | ({token} TEXT?)+' if free_tokens else ''}"
    yield LLAMA_TERMINALS
    if reasoning == "none":
        yield f"start: {answer}"
        return
    end = _or_token("thought_end", "TEXT?", tokens.visible.get(THOUGHT_END))
    first_end = _or_token("first_end", "FIRST?", tokens.visible.get(THOUGHT_END))
    yield f"answer: {answer}"
    yield f"thought: BLANKS? ({first_end}{f' | FIRST? {token} {gaps} {end}' if free_tokens else ''})"
    yield f"first_end[lazy]: FIRST? {json.dumps(THOUGHT_END)}"
    yield f"thought_end[lazy]: TEXT? {json.dumps(THOUGHT_END)}"
    if reasoning == "opened":
        yield f"start: {gaps} {end} thought* answer | {gaps} TEXT? {_repeated(tokens.hidden)}"
    else:
        yield "start: thought* answer"


def _or_token(rule: str, before: str, token: int | None) -> str:
    """Returns a mark as a rule, or as a token after `before`."""
    return rule if token is None else f"({rule} | {before} {_token([token])})"


def _gaps(tokens: list[int]) -> str:
    """Returns text up to the last of any number of these tokens."""
    return f"(TEXT? {_token(tokens)})*" if tokens else ""


def _repeated(tokens: list[int]) -> str:
    return f"{_token(tokens)}*" if tokens else ""


def _token(tokens: list[int]) -> str:
    """Returns any one of these tokens."""
    return f"<[{','.join(map(str, sorted(tokens)))}]>"
